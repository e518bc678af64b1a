"""Reports: whole pages against golden files, and the words one by one."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import PlanError
from autopar.plans import CollectiveRow, Cost, MeshRecord, Plan, SolverReport
from autopar.report.summary import main_reason
from autopar.report.technique import layout_text, module_strategies, parameter_techniques
from autopar.report.text import WIDTH, exact_bytes, format_bytes, format_seconds, format_shape, table
from tests.autopar.fake_plans import small_plan, two_axis_plan

Golden = Callable[[str, str], None]


def _other_plan() -> Plan:
    """Return ``two_axis_plan`` with the first three ``up`` layers data parallel, and slower."""
    plan = two_axis_plan()
    changed = {f"layers.{layer}.mlp.up.weight": "R,S0" for layer in range(3)}
    nodes = {plan.placeholders[name] for name in changed}
    return msgspec.structs.replace(
        plan,
        parameters={**plan.parameters, **changed},
        collectives=tuple(row for row in plan.collectives if row.tensor not in nodes),
        cost=Cost(step_seconds=0.02, compute_seconds=0.0101, communication_seconds=0.0099),
        options=msgspec.structs.replace(plan.options, memory=None),
    )


PAGES: dict[str, Callable[[], str]] = {
    "summary": lambda: str(two_axis_plan()),
    "summary_small": lambda: str(small_plan()),
    "explain_module": lambda: two_axis_plan().explain("layers.0.mlp"),
    "explain_leaf": lambda: two_axis_plan().explain("layers.0.mlp.up"),
    "explain_parameter": lambda: two_axis_plan().explain("layers.0.mlp.up.weight"),
    "explain_op": lambda: two_axis_plan().explain("contract_2"),
    "explain_input": lambda: two_axis_plan().explain("args[0]"),
    "explain_output": lambda: two_axis_plan().explain("['logits']"),
    "diff": lambda: two_axis_plan().diff(_other_plan()),
}


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_the_golden_ones_and_narrow(page: str, golden: Golden) -> None:
    """A page reads as its golden file does, within 110 columns, without colour codes."""
    text = PAGES[page]()
    assert max(map(len, text.splitlines())) <= 110
    assert text.isascii() and "\x1b" not in text
    golden(f"report/{page}.txt", text)


def test_the_summary_folds_layers_and_names_techniques() -> None:
    """Depth does not lengthen the page, and each technique has its name."""
    deep = str(two_axis_plan(96))
    starts = [[line[:10] for line in page.splitlines() if line[2:3].strip()] for page in (str(two_axis_plan(3)), deep)]
    assert sorted(starts[0]) == sorted(starts[1])
    line = next(line for line in deep.splitlines() if "layers.*.mlp.up.weight" in line)
    assert line.split()[1] == "96"
    assert "S1 over data (ZeRO-3), S0 over model (column)" in line


def test_techniques_of_parameters() -> None:
    """Column, row, ZeRO-3 and data parallel are read off layout, roles and collectives."""
    techniques = parameter_techniques(two_axis_plan())
    assert techniques["layers.0.mlp.up.weight"] == ("ZeRO-3", "column")
    assert techniques["layers.0.mlp.down.weight"] == ("ZeRO-3", "row")
    assert techniques["embed.weight"] == ("data parallel", "")


def test_a_whole_parameter_whose_gradient_is_summed_is_data_parallel() -> None:
    """Also where no split has a name; split along the sequence it is called so."""
    plan = two_axis_plan(1)
    unnamed = msgspec.structs.replace(plan, roles={})
    assert parameter_techniques(unnamed)["embed.weight"] == ("data parallel", "")
    roles = {**plan.roles, "embedding": ("sequence", ""), "embedding_dense_backward": ("sequence", "")}
    assert parameter_techniques(msgspec.structs.replace(plan, roles=roles))["embed.weight"] == ("sequence", "")


def test_techniques_without_the_records_for_reports() -> None:
    """A plan that has only what lowering needs is told without guesses."""
    plan = msgspec.structs.replace(two_axis_plan(1), roles={}, modules={}, phases={}, placeholders={}, gradients={})
    assert parameter_techniques(plan)["layers.0.mlp.up.weight"] == ("sharded", "sharded")
    assert plan.strategies["contract_0"] == "split of a over data, split of n over model"
    assert "sharded" in str(plan)


def test_strategies_of_modules() -> None:
    """A module is told by what its forward ops do; an axis of one rank is not told of."""
    assert two_axis_plan().strategies["layers.3.mlp.down"] == "batch over data, row over model"
    plan = two_axis_plan()
    narrow = msgspec.structs.replace(plan, mesh_record=MeshRecord(sizes=(1, 2), names=("data", "model"), device="cpu"))
    assert module_strategies(narrow)["layers.3.mlp.down"] == "row over model"
    assert list(two_axis_plan(12).strategies)[-1] == "layers.11.mlp.up"


def test_a_named_role_goes_before_the_name_of_a_factor() -> None:
    """Where one op's split has a name, the nameless splits of its neighbours are not told."""
    plan = two_axis_plan(1)
    choices, modules = {**plan.choices, "gelu": ("d0", "d2")}, {**plan.modules, "gelu": "layers.0.mlp.up"}
    more = msgspec.structs.replace(plan, choices=choices, modules=modules, phases={**plan.phases, "gelu": "forward"})
    assert more.strategies["layers.0.mlp.up"] == "batch over data, column over model"
    own = {**plan.roles, "gelu": ("d0", "d2")}
    assert msgspec.structs.replace(more, roles=own).strategies == more.strategies
    unnamed = msgspec.structs.replace(more, roles={})
    assert unnamed.strategies["layers.0.mlp.up"].endswith("split of n and split of d2 over model")


def test_properties_are_those_of_the_records() -> None:
    """The public properties read the records."""
    plan = small_plan()
    assert (plan.step_seconds, plan.memory_bytes) == (0.003, 16100)
    assert [str(p) for p in two_axis_plan().placements["layers.0.mlp.up.weight"]] == ["S(1)", "S(0)"]
    assert repr(plan) == "<Plan for Mesh(data=2, device=cpu): 0.003 s a step, optimal>"


def test_explain_names_the_nearest_when_it_knows_none() -> None:
    """An unknown name is an error with the names that it may have meant."""
    with pytest.raises(PlanError, match=r"called 'layer.0.mlp.upp'; nearest: layers.0.mlp.up"):
        two_axis_plan().explain("layer.0.mlp.upp")
    with pytest.raises(PlanError, match=r"nearest: layers.0.mlp.down"):
        two_axis_plan().explain("down")
    with pytest.raises(PlanError, match="print the plan"):
        two_axis_plan().explain("~~~~~~")


def test_explain_takes_the_names_of_the_pages() -> None:
    """A name with a star is that of several: all are named, the first is told."""
    plan = two_axis_plan(12)
    head, rest = plan.explain("layers.*.mlp.up.weight").split("\n\n", 1)
    assert head.startswith("layers.*.mlp.up.weight fits 12: layers.0.mlp.up.weight, layers.1.mlp.up.weight,")
    assert "layers.11.mlp.up.weight" in head and max(map(len, head.splitlines())) <= 110
    assert rest == plan.explain("layers.0.mlp.up.weight")
    with pytest.raises(PlanError, match="knows no module"):
        plan.explain("layers.*.nothing")


def test_explain_counts_what_moves_for_a_parameter() -> None:
    """Two gathers and one reduction, and no row of a name that only begins alike."""
    text = two_axis_plan(12).explain("layers.1.mlp.up")
    assert sum("all_gather" in line for line in text.splitlines()) == 2
    assert sum("reduce_scatter" in line for line in text.splitlines()) == 1
    assert "layers_11" not in text and "layers_10" not in text


def test_diff_of_equal_plans_and_of_other_programs() -> None:
    """Equal plans are said to be equal; plans of two programs are said to be of two."""
    plan = two_axis_plan()
    assert plan.diff(two_axis_plan()) == "the plans are equal"
    assert "different programs" in plan.diff(msgspec.structs.replace(plan, fingerprint="0" * 64))
    assert "different meshes" in plan.diff(small_plan())


def test_diff_folds_only_what_changed() -> None:
    """Three of four layers differ: the label says which three."""
    assert "layers.0-2.mlp.up.weight" in two_axis_plan().diff(_other_plan())


def test_diff_tells_of_the_solver() -> None:
    """A plan that is not proved optimal shows as such."""
    plan = small_plan()
    doubtful = SolverReport(
        status="feasible", objective_s=0.003, bound_s=0.002, gap=0.5, seconds=1.0, variables=12, constraints=8
    )
    assert "feasible, gap 50 %" in plan.diff(msgspec.structs.replace(plan, solver=doubtful))


def test_the_main_reason_is_the_dearest() -> None:
    """Reasons are folded by index and weighed by seconds."""

    def row(reason: str, seconds: float) -> CollectiveRow:
        return CollectiveRow(
            kind="all_gather", axis=0, tensor="t", phase="forward", bytes=1, seconds=seconds, reason=reason
        )

    rows = [row("for h.0.x", 1.0), row("for h.1.x", 1.0), row("for y", 1.5)]
    assert main_reason(rows) == "for h.*.x (+ 1 more)"
    assert main_reason([row("", 1.0)]) == "not said"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (40_000_000_000, "40 GB"), (10**16, "10.000 PB")]
)
def test_bytes_have_units(count: int, text: str) -> None:
    """Decimal units, three digits."""
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (1e-9, "1 ns"), (2.5e-6, "2.5 us"), (0.0123, "12.3 ms"), (1.0, "1 s"), (1e6, "1,000,000 s")],
)
def test_seconds_have_units(seconds: float, text: str) -> None:
    """The unit fits the amount."""
    assert format_seconds(seconds) == text


def test_axes_that_do_the_same_stand_together() -> None:
    """One phrase for two axes that split alike, two for two that do not."""
    plan = two_axis_plan(1)
    assert layout_text(plan, "S0,S0", ("ZeRO-3", "ZeRO-3")) == "S0 over data, model (ZeRO-3)"
    assert layout_text(plan, "S0,S0", ("ZeRO-3", "row")) == "S0 over data (ZeRO-3), S0 over model (row)"
    assert layout_text(plan, "R,R") == "whole on every rank"


def test_tables_do_not_read_markup() -> None:
    """Names with brackets stand as they are."""
    text = table(("name", "n"), [("kwargs['labels'] [bold]x[/bold]", "1")])
    assert "kwargs['labels'] [bold]x[/bold]" in text
    assert format_shape(()) == "scalar"


def _words(mark: str, longest: int) -> st.SearchStrategy[str]:
    """Return cells of words made of one letter."""
    count = 1 if longest != 30 else 9
    return st.lists(st.integers(1, longest), max_size=count).map(lambda sizes: " ".join(mark * n for n in sizes))


@given(
    st.lists(st.tuples(*(_words(mark, longest) for mark, longest in zip("abcde", (120, 9, 40, 15, 30)))), min_size=1)
)
def test_tables_are_narrow_and_lose_nothing(rows: list[tuple[str, ...]]) -> None:
    """Whatever is in the cells, no character of them is cut off and no line is too long."""
    text = table(("N", "C", "S", "P", "R"), rows, right=("C",))
    for mark, cells in zip("abcde", zip(*rows)):
        assert text.count(mark) == sum(cell.count(mark) for cell in cells)
    assert max(map(len, text.splitlines())) <= WIDTH - 2


def test_bytes_that_can_be_copied() -> None:
    """A budget that an error names stands in bytes, with its unit behind when there are many."""
    assert [exact_bytes(n) for n in (1, 999, 21566)] == ["1 byte", "999 bytes", "21566 bytes (21.6 kB)"]
