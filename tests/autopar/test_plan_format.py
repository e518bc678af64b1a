"""Plan files: what is written is read back to the byte, and what is wrong is refused with advice."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar import plan_check
from autopar.errors import PlanError
from autopar.passes import schedules
from autopar.plans import SCHEMA, Options, PipelineRecord, Plan, Route
from tests.autopar.fake_plans import small_plan, two_axis_plan

ROOT = Path(__file__).resolve().parents[2]
Tree = dict[str, Any]
STAGED = PipelineRecord(micro_batches=8, ranks=2, schedule="1f1b", cuts=("layers.1",))


@pytest.mark.parametrize(
    "plan", [small_plan(), two_axis_plan(), small_plan(pipeline=STAGED)], ids=["small", "two_axis", "staged"]
)
def test_a_saved_plan_is_read_back_equal(plan: Plan, tmp_path: Path) -> None:
    """Save and load change nothing, and the file is what ``to_bytes`` returns."""
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert (tmp_path / "plan.json").read_bytes() == plan.to_bytes()
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_equal_plans_are_equal_bytes_whatever_their_order() -> None:
    """The order in which a table was filled does not show in the file."""
    plan = two_axis_plan()
    turned = msgspec.structs.replace(plan, choices=dict(reversed(plan.choices.items())))
    assert list(turned.choices) != list(plan.choices)
    assert turned.to_bytes() == plan.to_bytes()


@pytest.mark.parametrize("seed", ["0", "1"])
def test_the_bytes_do_not_depend_on_the_hash_seed(seed: str) -> None:
    """Another process under another hash seed writes the same bytes."""
    code = (
        "import sys; from tests.autopar.fake_plans import two_axis_plan as p; sys.stdout.buffer.write(p().to_bytes())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
        capture_output=True,
    )
    assert done.stdout == two_axis_plan().to_bytes(), done.stderr


def _tree(plan: Plan) -> Tree:
    return dict(json.loads(plan.to_bytes()))


def _set(*path: Any) -> Callable[[Tree], None]:
    *way, key, value = path

    def change(tree: Tree) -> None:
        spot: Any = tree
        for step in way:
            spot = spot[step]
        spot[key] = value

    return change


def _pipeline(**fields: Any) -> Callable[[Tree], None]:
    return _set("pipeline", {"micro_batches": 2, **fields})


HOSTILE: dict[str, tuple[Callable[[Tree], None], str]] = {
    "newer schema": (_set("schema", SCHEMA + 1), "upgrade autopar"),
    "newer schema with unknown fields": (lambda t: t.update(schema=99, stages=[1]), "upgrade autopar"),
    "older schema": (_set("schema", 0), "no autopar wrote"),
    "schema of another type": (_set("schema", "1"), "no whole number"),
    "schema true": (_set("schema", True), "no whole number"),
    "no schema": (lambda t: t.pop("schema"), "names no schema"),
    "unknown field": (_set("evil", 1), "unknown field `evil`"),
    "unknown field inside": (_set("cost", "evil", 1), "unknown field `evil`"),
    "missing field": (lambda t: t.pop("routes"), "missing required field `routes`"),
    "wrong type": (_set("choices", []), r"\$.choices"),
    "wrong type deep": (_set("routes", 0, "arcs", 0, 0, 7), r"\$.routes\[0\].arcs"),
    "text for a number": (_set("cost", "step_seconds", "1.0"), "step_seconds"),
    "true for a number": (_set("memory", "saved_bytes", True), "saved_bytes"),
    "null for a number": (_set("cost", "step_seconds", None), "step_seconds"),
    "fraction for a whole number": (_set("memory", "saved_bytes", 1.5), "saved_bytes"),
    "negative seconds": (_set("cost", "step_seconds", -1.0), "at least 0"),
    "huge float": (_set("solver", "gap", 10**400), "gap"),
    "giant bytes": (_set("memory", "total_bytes", 1 << 64), "beyond 64 bits"),
    "negative bytes": (_set("memory", "total_bytes", -1), "total_bytes is -1"),
    "no fingerprint": (_set("fingerprint", ""), "no fingerprint"),
    "mesh without axes": (_set("mesh_record", "sizes", []), "1 names"),
    "mesh of no ranks": (_set("mesh_record", "sizes", [0]), "1 to"),
    "mesh of too many ranks": (_set("mesh_record", "sizes", [1 << 40]), "1 to"),
    "mesh of too many axes": (_set("mesh_record", "sizes", [1] * 99), "99 axes"),
    "mesh with repeated names": (
        lambda t: t["mesh_record"].update(sizes=[2, 2], names=["a", "a"]),
        "different names",
    ),
    "mesh with links for other axes": (_set("mesh_record", "links", ["x", "y"]), "links"),
    "memory budget of nothing": (_set("options", "memory", 0), "memory budget"),
    "unknown inputs": (_set("options", "inputs", "some"), "none of global, local"),
    "unknown outputs": (_set("options", "outputs", "some"), "none of auto, full, lie"),
    "pinned to another mesh": (_set("options", "pinned", {"weight": "R,R"}), "pinned layout of weight"),
    "choices for another mesh": (_set("choices", "contract", ["a", "b"]), "2 entries for 1 mesh axes"),
    "choice without a name": (_set("choices", "contract", [""]), "no name"),
    "role of no op": (_set("roles", {"gone": ["row"]}), "names 'gone'"),
    "roles for another mesh": (_set("roles", {"contract": ["row", "row"]}), "2 entries"),
    "unknown phase": (_set("phases", {"contract": "sideways"}), "none of forward, backward"),
    "layout for another mesh": (_set("parameters", "weight", "R,R"), "2 placements for 1 mesh axes"),
    "layout that is none": (_set("parameters", "weight", "Q"), "no placement"),
    "layout of nothing": (_set("parameters", "weight", ""), "0 placements"),
    "layout of a giant dim": (_set("parameters", "weight", "S" + "9" * 300), "no tensor has more"),
    "layout of a dim that is not there": (_set("parameters", "weight", "S2"), "split on dim 2"),
    "partial parameter": (_set("parameters", "weight", "P"), "partial value"),
    "partial input": (_set("inputs", "args[0]", "P(max)"), "partial value"),
    "partial output": (_set("outputs", "", "P"), "partial value"),
    "split too small": (
        lambda t: t.update(parameters={"weight": "S0"}, parameter_shapes={"weight": [1, 8]}),
        "a rank would have none",
    ),
    "shape of nobody": (_set("parameter_shapes", "gone", [1]), "names 'gone'"),
    "shape of giant dims": (_set("parameter_shapes", "weight", [1 << 40, 1 << 40]), "number of elements"),
    "shape of negative dims": (_set("parameter_shapes", "weight", [-1, 8]), "a dim of weight is -1"),
    "shape of many dims": (_set("parameter_shapes", "weight", [1] * 1000), "1000 dims"),
    "route twice": (lambda t: t["routes"].append(t["routes"][0]), "two routes"),
    "arc twice": (_set("routes", 0, "arcs", [["P", "R"], ["P", "R"]]), "an arc twice"),
    "arc of two steps": (_set("routes", 0, "arcs", [["R", "R"]]), "one collective changes one axis"),
    "arc to a partial value": (_set("routes", 0, "arcs", [["R", "P"]]), "makes a partial value"),
    "arc of three ends": (_set("routes", 0, "arcs", [["R", "S0", "R"]]), "arcs"),
    "route in no phase": (_set("routes", 0, "phase", "later"), "none of forward"),
    "saved twice": (_set("saved", "contract", ["R", "R"]), "saved twice"),
    "saved for another mesh": (_set("saved", "contract", ["R,R"]), "a saved layout of contract"),
    "unknown collective": (_set("collectives", 0, "kind", "teleport"), "none of all_gather"),
    "collective on no axis": (_set("collectives", 0, "axis", 1), "axis 1 of a mesh of 1"),
    "collective on a negative axis": (_set("collectives", 0, "axis", -1), "axis -1"),
    "collective of negative bytes": (_set("collectives", 0, "bytes", -4), "-4"),
    "collective in negative time": (_set("collectives", 0, "seconds", -4.0), "-4"),
    "no micro-batch": (_pipeline(micro_batches=0), "number of micro-batches is 0"),
    "unknown schedule": (_pipeline(schedule="chaos"), "none of gpipe, 1f1b"),
    "pipeline of no ranks": (_pipeline(ranks=0), "0 ranks"),
    "stages that no ranks share": (_pipeline(ranks=2, cuts=["a", "b"]), "3 stages can't lie on 2 ranks"),
    "pipeline axis nowhere": (_pipeline(axis=5), "no place 5"),
    "pipeline axis of another's name": (_pipeline(name="data"), "'data' has no place"),
    "cut twice": (_pipeline(ranks=3, cuts=["a", "a"]), "start at the same place"),
    "solver without status": (_set("solver", "status", ""), "no status"),
    "long text": (_set("fingerprint", "f" * 5000), "5000 characters"),
    "text that moves the cursor": (_set("modules", "contract", "\x1b[2J"), "can't be printed"),
    "text that is no unicode": (_set("modules", "contract", "\ud800"), "can't be printed"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_wrong_plan_is_refused(case: str, tmp_path: Path) -> None:
    """Each broken invariant is named, as a PlanError, and the message says what to do."""
    change, message = HOSTILE[case]
    tree = _tree(small_plan())
    change(tree)
    (tmp_path / "plan.json").write_text(json.dumps(tree))
    with pytest.raises(PlanError, match=message) as caught:
        Plan.load(tmp_path / "plan.json")
    assert any(advice in str(caught.value) for advice in ("again", "anew", "upgrade", "pass a file", "write S<dim>"))


TEXTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not JSON"),
    "not JSON": (b"pickle", "not JSON"),
    "another JSON": (b"[1, 2]", "no plan"),
    "a number": (b"7", "no plan"),
    "bytes": (b"\x80\x04\x95\xff\xfe", "not"),
    "deep lists": (b"[" * 200_000, "deeper"),
    "deep objects": (b'{"a":' * 200_000, "deeper"),
    "giant integer": (b'{"schema": ' + b"9" * 100_000 + b"}", "refused"),
    "NaN": (b'{"schema": 1, "cost": NaN}', "NaN is no number"),
    "infinity": (b'{"schema": 1, "cost": -Infinity}', "-Infinity is no number"),
    "a name twice": (b'{"schema": 1, "schema": 2}', "stands twice"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_a_text_that_is_no_plan_is_refused(case: str) -> None:
    """Whatever the bytes are, the answer is a PlanError."""
    data, message = TEXTS[case]
    with pytest.raises(PlanError, match=message):
        Plan.from_bytes(data)


def test_a_plan_cut_short_is_refused_at_every_length() -> None:
    """No prefix of a plan is taken for a plan."""
    data = small_plan().to_bytes().rstrip()
    for length in range(0, len(data), 37):
        with pytest.raises(PlanError, match=r"not JSON|cut short"):
            Plan.from_bytes(data[:length])


@given(st.data())
def test_a_damaged_plan_is_refused_or_is_another_valid_plan(data: st.DataObject) -> None:
    """One value replaced by any other: a PlanError or a plan that keeps its invariants, never another error."""
    tree = _tree(small_plan())
    spot: Any = tree
    while True:
        keys = sorted(spot) if isinstance(spot, dict) else list(range(len(spot)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(spot[key], (dict, list)) or not spot[key] or data.draw(st.booleans()):
            break
        spot = spot[key]
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
    spot[key] = data.draw(
        st.recursive(scalars, lambda s: st.lists(s, max_size=3) | st.dictionaries(st.text(max_size=3), s))
    )
    try:
        plan = Plan.from_bytes(json.dumps(tree).encode())
    except PlanError:
        return
    assert Plan.from_bytes(plan.to_bytes()) == plan
    str(plan)


def test_files_that_cannot_be_read_or_written_are_plan_errors(tmp_path: Path) -> None:
    """A missing file, a folder, and a missing folder each say what to check."""
    with pytest.raises(PlanError, match="check the path"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(PlanError, match="check the path"):
        Plan.load(tmp_path)
    with pytest.raises(PlanError, match="folder exists"):
        small_plan().save(tmp_path / "none" / "plan.json")


def test_a_plan_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    """Save refuses what load would refuse, and leaves the old file alone."""
    path = tmp_path / "plan.json"
    small_plan().save(path)
    before = path.read_bytes()
    broken = small_plan(routes=(Route(tensor="x", phase="forward", arcs=(("R", "P"),)),))
    with pytest.raises(PlanError, match="makes a partial value"):
        broken.save(path)
    assert path.read_bytes() == before


def test_infinity_is_not_written() -> None:
    """JSON has no infinity; a plan with one is refused before it is written as something else."""
    plan = small_plan()
    broken = msgspec.structs.replace(plan, cost=msgspec.structs.replace(plan.cost, step_seconds=float("inf")))
    with pytest.raises(PlanError, match="step_seconds is inf"):
        broken.to_bytes()


def test_schedules_are_those_that_run() -> None:
    """Plans name the schedules that there are tables of, and no others."""
    assert set(plan_check.SCHEDULES) == set(schedules.SCHEDULES)


def test_a_plan_is_frozen() -> None:
    """Fields can't be reassigned."""
    with pytest.raises(AttributeError):
        small_plan().options = Options()  # type: ignore[misc]


def test_the_seconds_of_solving_are_told_but_not_kept() -> None:
    """Two runs that differ in speed alone give equal plans and equal bytes."""
    plan = small_plan()
    slower = msgspec.structs.replace(plan, solver=msgspec.structs.replace(plan.solver, seconds=99.0))
    assert slower == plan
    assert slower.to_bytes() == plan.to_bytes()
    assert "found in 99 s" in str(slower) and "found in" not in str(Plan.from_bytes(slower.to_bytes()))
    assert plan != msgspec.structs.replace(plan, solver=msgspec.structs.replace(plan.solver, variables=1))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda plan: Plan.load(3), "named by its path; got int"),  # type: ignore[arg-type]
        (lambda plan: plan.save(None), "named by its path; got NoneType"),
        (lambda plan: plan.explain(3), "explain takes the name"),
        (lambda plan: plan.diff("plan.json"), r"Plan\.load"),
    ],
)
def test_arguments_of_the_wrong_type_are_refused(call: Any, words: str) -> None:
    """What a plan is asked is checked before anything is read."""
    with pytest.raises(PlanError, match=words):
        call(small_plan())
