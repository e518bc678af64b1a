"""Which all-reduces on two axes become one."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
import torch
from torch import fx

from autopar.errors import LoweringError
from autopar.mesh import Mesh
from autopar.passes.collective_calls import collective_calls
from autopar.passes.collectives_of import collectives_of
from autopar.passes.complete_plan import complete_plan
from autopar.passes.improve.check_joint import check_joint
from autopar.passes.improve.edits import apply_edits
from autopar.passes.improve.join_axes import join_axes
from autopar.passes.improve.setting import Setting
from autopar.passes.lower import lower, lower_ranks
from autopar.runtime.simulate import simulate_step
from tests.passes.improve.small_graph import SmallGraph
from tests.passes.test_lower import DATA
from tests.passes.tiny_program import tiny_program

ATEN = torch.ops.aten
SAME = Mesh((2, 2), device="h100", links=("nvlink4", "nvlink4"))


def groups(joint: fx.GraphModule, mesh: Mesh = SAME) -> list[str]:
    """Return the groups of the collectives behind the pass; the graph is sound."""
    apply_edits([joint.graph], join_axes(joint, Setting(mesh, (), ())))
    check_joint(joint)
    return [str(call.arguments[-1]) for node in joint.graph.nodes for call in collective_calls(node)]


def sums(*axes: int, shape: tuple[int, ...] = (1000,)) -> fx.GraphModule:
    """Return a graph that sums a tensor along some axes, one after the other."""
    g = SmallGraph(shape)
    value = origin = g.op(ATEN.neg.default, g.input("x"), name="made")
    for axis in axes:
        value = g.op(ATEN.contiguous.default, value, arc="all_reduce", origin=origin.name)
        value = g.all_reduce(value, f"sum_{axis}", axis)
        value.meta["origin"] = value.args[0].meta["origin"] = origin.name  # type: ignore[union-attr]
    return g.joint(value)


def test_all_axes_of_a_chain_become_one() -> None:
    """Two or three, in whatever order; the steps stay in that order."""
    assert groups(sums(0, 1)) == ["axis:0+1"]
    joint = sums(2, 0, 1)
    assert groups(joint, Mesh((2, 2, 2), device="h100", links=("nvlink4",) * 3)) == ["axis:0+1+2"]
    (call,) = [call for node in joint.graph.nodes for call in collective_calls(node)]
    assert call.axes == (2, 0, 1) and call.origin == "made"


@pytest.mark.parametrize("how", ["read", "returned", "op", "tensor", "phase", "computed"])
def test_what_somebody_sees_in_between_stays(how: str) -> None:
    """Whoever reads the first sum, another op, tensor or phase, or something that is computed keeps them apart."""
    g = SmallGraph((1000,))
    first = g.all_reduce(g.op(ATEN.neg.default, g.input("x"), name="made"), "first", 0)
    taken = g.op(ATEN.exp.default, first) if how == "computed" else first
    second = g.all_reduce(taken, "second", 1)
    call = second.args[0]
    assert isinstance(call, fx.Node)
    call.meta["origin"] = "made" if how != "tensor" else "other"
    ends = [second]
    if how == "read":
        ends.append(g.op(ATEN.neg.default, first))
    if how == "returned":
        ends.append(first)
    if how == "op":
        call.args = (call.args[0], "max", call.args[2])
    if how == "phase":
        call.meta["phase"] = second.meta["phase"] = "backward"
    assert groups(g.joint(*ends)) == ["axis:0", "axis:1"]


def test_nothing_in_between_is_what_joins() -> None:
    """The same graph as above without any of that."""
    g = SmallGraph((1000,))
    first = g.all_reduce(g.op(ATEN.neg.default, g.input("x"), name="made"), "first", 0)
    second = g.all_reduce(first, "second", 1)
    second.args[0].meta["origin"] = "made"  # type: ignore[union-attr]
    assert groups(g.joint(second)) == ["axis:0+1"]


def test_the_verifier_sees_a_group_that_is_not_that_of_the_arcs() -> None:
    """The group is what runs, the arcs are what is listed."""
    joint = sums(0, 1)
    groups(joint)
    (call,) = [node for node in joint.graph.nodes if collective_calls(node)]
    call.args = (*call.args[:-1], "axis:0")
    with pytest.raises(LoweringError, match=r"on the axes \(0, 1\), but its group is axis:0"):
        check_joint(joint)


def test_links_decide() -> None:
    """A slow link that is nearer than a fast one is no group that the prices know: the two stay."""
    assert groups(sums(0, 1), Mesh((2, 2), device="h100", links=("nvlink4", "infiniband_400"))) == ["axis:0", "axis:1"]


def test_a_slower_ring_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the cost of the group is above that of both, nothing is joined; at equal cost it is."""
    module = "autopar.passes.improve.join_axes.all_reduce_seconds"
    monkeypatch.setattr(module, lambda ranks, size, link, device: {2: 1.0, 4: 2.5}[ranks])
    assert groups(sums(0, 1)) == ["axis:0", "axis:1"]
    monkeypatch.setattr(module, lambda ranks, size, link, device: {2: 1.0, 4: 2.0}[ranks])
    assert groups(sums(0, 1)) == ["axis:0+1"]


def test_a_data_parallel_step_lists_what_its_plan_lists() -> None:
    """The gradient goes once over all four ranks; rows, bytes and numbers stay."""
    program = tiny_program(rows=8)
    both = {name: names * 2 for name, names in DATA.items()}
    plan = complete_plan(program, SAME, both, {"up.weight": (-1, -1)})
    off = msgspec.structs.replace(plan, options=msgspec.structs.replace(plan.options, disable=("join_axes",)))
    torch.manual_seed(0)
    shapes = {name: program.nodes()[name].meta["val"].shape for name in ("w", "x")}
    values = {name: torch.randn(shape) for name, shape in shapes.items()} | {"t": torch.tensor(1.0)}
    found = [simulate_step(lower_ranks(program, each), values) for each in (plan, off)]
    assert torch.equal(found[0].values[1], found[1].values[1])  # type: ignore[arg-type]
    listed = Counter((r.kind, r.axis, r.tensor, r.phase, r.bytes) for r in plan.collectives)
    for each, result in zip((plan, off), found):
        assert Counter((m.kind, m.axis, m.tensor, m.phase, m.bytes) for m in result.moved) == listed
        local = lower(program, each, (0, 0))
        assert Counter((r.kind, r.axis, r.tensor, r.phase, r.bytes) for r in collectives_of(local)) == listed
    calls = [call for node in lower(program, plan, (0, 0)).joint.graph.nodes for call in collective_calls(node)]
    assert [call.axes for call in calls if call.origin == "contract_default_1"] in ([(0, 1)], [(1, 0)])
