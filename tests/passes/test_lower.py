"""Lowering on a program small enough to know by heart."""

from __future__ import annotations

import msgspec
import pytest
import torch

from autopar.errors import LoweringError, PlanError
from autopar.mesh import Mesh
from autopar.passes.collectives_of import collectives_of, format_local
from autopar.passes.complete_plan import complete_plan
from autopar.passes.lower import lower
from autopar.passes.program import Program
from autopar.placement import parse_layout
from autopar.plans import Plan, Route
from autopar.runtime.simulate import StepResult, simulate_step
from tests.passes.tiny_program import tiny_program, tiny_step

DATA = {
    "contract_default": ("b",),
    "relu_default": ("b",),
    "sum_default": ("b",),
    "expand_default": ("b",),
    "threshold_backward_default": ("b",),
    "contract_default_1": ("b",),
}
COLUMN = dict.fromkeys(DATA, ("o",))


def plan_of(program: Program, mesh: Mesh, choices: dict[str, tuple[str, ...]], weight: str = "R") -> Plan:
    """Return the full plan of a choice, the weight resting as told."""
    return complete_plan(program, mesh, choices, {"up.weight": parse_layout(weight)})


def run(program: Program, plan: Plan) -> tuple[StepResult, torch.Tensor, torch.Tensor]:
    """Simulate a plan; return what came out and what eager computes."""
    torch.manual_seed(0)
    w, x = (program.nodes()[name].meta["val"].shape for name in ("w", "x"))
    values = {"w": torch.randn(w), "x": torch.randn(x), "t": torch.tensor(1.0)}
    programs = [lower(program, plan, c) for c in plan.mesh.coordinates()]
    return simulate_step(programs, values), *tiny_step(values["x"], values["w"])


@pytest.mark.parametrize(
    ("choices", "weight", "sizes"),
    [
        (DATA, "R", (2,)),
        (DATA, "S0", (3,)),
        (DATA, "S1", (3,)),
        (COLUMN, "S0", (3,)),
        (COLUMN, "R", (2,)),
        ({"contract_default": ("i",), "relu_default": ("b",)}, "S1", (3,)),
        (dict.fromkeys(DATA, ("b", "o")), "S0,S0", (2, 2)),
        (dict.fromkeys(DATA, ("o", "o")), "S1,S0", (2, 2)),
    ],
)
def test_a_plan_computes_what_eager_computes(
    choices: dict[str, tuple[str, ...]], weight: str, sizes: tuple[int, ...]
) -> None:
    """Loss and gradient come out, the collectives that ran are those of the plan."""
    program = tiny_program()
    plan = plan_of(program, Mesh(sizes), choices, weight)
    result, loss, gradient = run(program, plan)
    assert result.values[0] is not None and result.values[1] is not None
    torch.testing.assert_close(result.values[0], loss)
    torch.testing.assert_close(result.values[1], gradient)
    ran = sorted((m.kind, m.axis, m.tensor, m.phase, m.bytes) for m in result.moved)
    assert ran == sorted((r.kind, r.axis, r.tensor, r.phase, r.bytes) for r in plan.collectives)


def test_data_parallel_reduces_the_gradient_once() -> None:
    """Over a split batch the loss and the gradient are summed, nothing else moves."""
    program = tiny_program()
    local = lower(program, plan_of(program, Mesh((2,), ("data",)), DATA), (1,))
    rows = collectives_of(local)
    assert [(r.kind, r.tensor, r.phase) for r in rows] == [
        ("all_reduce", "sum_default", "forward"),
        ("all_reduce", "contract_default_1", "backward"),
    ]
    assert rows[1].reason == "summed over data: wanted whole by the gradient of up.weight"
    assert rows[1].bytes == 7 * 5 * 4


def test_a_sharded_parameter_is_gathered_in_each_phase_that_reads_it() -> None:
    """ZeRO-3: gathered for the forward; its gradient comes back in pieces."""
    program = tiny_program(out=8)
    plan = plan_of(program, Mesh((2,), ("data",)), DATA, "S0")
    text = format_local(lower(program, plan, (0,)))
    assert "# w gathered over data: wanted whole by up (batch)" in text
    assert "summed and scattered over data: wanted split along dim 0 by the gradient of up.weight" in text
    assert "w: [4, 5] in S0" in text


def test_halves_run_apart() -> None:
    """The forward takes no tangent, the backward takes what was saved; both print as graphs."""
    program = tiny_program()
    local = lower(program, plan_of(program, Mesh((2,)), DATA), (0,))
    assert local.backward is not None
    takes = [n.name for n in local.backward.graph.nodes if n.op == "placeholder"]
    assert takes == ["x", "relu_default", "t"]
    assert local.num_saved == 2
    assert [n.name for n in local.forward.graph.nodes if n.op == "placeholder"] == ["w", "x"]
    assert "linear" in local.forward.code and "wait_tensor" in local.backward.code


def test_contract_becomes_a_library_op() -> None:
    """The forward product is a linear, the weight's gradient an einsum."""
    program = tiny_program()
    local = lower(program, plan_of(program, Mesh((2,)), DATA), (0,))
    targets = [str(n.target) for n in local.joint.graph.nodes if n.op == "call_function"]
    assert "aten.linear.default" in targets and not any("contract" in t for t in targets)


def test_every_rank_runs_the_same_ops() -> None:
    """Seven columns over three ranks: shapes differ, the node sequence does not."""
    program = tiny_program()
    plan = plan_of(program, Mesh((3,)), COLUMN, "S0")
    sequences = {
        tuple((n.name, str(n.target)) for n in lower(program, plan, (rank,)).joint.graph.nodes) for rank in range(3)
    }
    assert len(sequences) == 1


def test_a_plan_for_another_program_is_refused() -> None:
    """The fingerprint tells."""
    plan = plan_of(tiny_program(), Mesh((2,)), DATA)
    with pytest.raises(PlanError, match="plan again"):
        lower(tiny_program(rows=8), plan, (0,))


def test_a_missing_node_an_unknown_choice_and_a_missing_route_are_named() -> None:
    """Every hole in a plan gets an error that says which node it is."""
    program = tiny_program()
    plan = plan_of(program, Mesh((2,)), DATA)
    short = {name: names for name, names in plan.choices.items() if name != "relu_default"}
    with pytest.raises(LoweringError, match="no choice for relu_default"):
        lower(program, msgspec.structs.replace(plan, choices=short), (0,))
    odd = {**plan.choices, "relu_default": ("diagonal",)}
    with pytest.raises(LoweringError, match=r"relu_default .* has no choice 'diagonal'; it has replicate, b, o"):
        lower(program, msgspec.structs.replace(plan, choices=odd), (0,))
    fewer = tuple(route for route in plan.routes if route.tensor != "contract_default_1")
    with pytest.raises(LoweringError, match="wants contract_default_1 in R in the backward"):
        lower(program, msgspec.structs.replace(plan, routes=fewer), (0,))
    astray = Route(tensor="contract_default_1", phase="backward", arcs=(("P", "S0"),))
    two_steps = (*fewer, astray)
    with pytest.raises(LoweringError, match="routes do not lead to R"):
        lower(program, msgspec.structs.replace(plan, routes=two_steps), (0,))
    with pytest.raises(LoweringError, match="does not say where the input"):
        lower(program, msgspec.structs.replace(plan, inputs={}), (0,))


def test_an_unsaved_tensor_is_not_there_in_the_backward() -> None:
    """What the plan does not save, the backward can't read."""
    program = tiny_program()
    plan = plan_of(program, Mesh((2,)), DATA)
    with pytest.raises(LoweringError, match="wants relu_default in S0 in the backward; there is nothing"):
        lower(program, msgspec.structs.replace(plan, saved={}), (0,))
