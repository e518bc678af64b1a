"""Outputs that no gradient reaches add nothing, not even zeros times infinity."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.assign_stages import assign_stages
from autopar.passes.capture import capture
from autopar.passes.cut_stages import cut_stages
from autopar.passes.improve.improve_stages import improve_stages
from autopar.passes.leave_out_tangents import leave_out_in_stages, leave_out_tangents
from autopar.passes.lower import lower, lower_ranks
from autopar.passes.micro_batches import micro_batches
from autopar.passes.schedules import make_schedule
from autopar.runtime.simulate_pipeline import simulate_pipeline
from autopar.runtime.simulated_module import SimulatedModule
from tests.strategies.plans import seeded_plan


class Several(nn.Module):
    """Three outputs: a plain one, one with infinite slopes, and one that has both behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return them."""
        y = self.layer(x)
        y.register_hook(lambda gradient: gradient + 1.0)
        return y, (y - y.detach()).sqrt() + self.other(x), self.other(y)


X = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("sizes", [(3,), (2, 2)], ids=str)
@pytest.mark.parametrize("loss", [lambda o: o[0].sum(), lambda o: (o[2] * o[0]).sum()], ids=["one", "two"])
def test_missing_gradients_are_no_zeros(sizes: tuple[int, ...], loss: Callable[..., Tensor]) -> None:
    """The root at zero has an infinite slope, which zero times is not a number; what nobody reaches stays None."""
    model = Several()
    expected = copy.deepcopy(model)
    loss(expected(X)).backward()
    for seed in range(3):
        one = copy.deepcopy(model)
        split = SimulatedModule(one, Mesh(sizes), lambda program, mesh, seed=seed: seeded_plan(program, mesh, seed))
        loss(split(X)).backward()
        for ours, theirs in zip(one.parameters(), expected.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            torch.testing.assert_close(ours.grad, theirs.grad)


def test_what_is_left_is_the_same_on_all_ranks() -> None:
    """Ranks run the same nodes, also where collectives of a missing gradient were run together with others."""
    program = annotate(capture(Several(), (X,)))
    for seed in range(4):
        plan = seeded_plan(program, Mesh((2, 2)), seed)
        halves = [rank.backward for rank in lower_ranks(program, plan, run=False)]
        tangents = [role.node for role in program.inputs if role.kind == "tangent"]
        kept = [leave_out_tangents(half, tangents[:1], tangents[1:]) for half in halves if half is not None]
        names = [[node.name for node in half.graph.nodes] for half in kept]
        assert all(each == names[0] for each in names)
        assert len(names[0]) < min(len(half.graph.nodes) for half in halves if half is not None)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "zero bubble"])
@pytest.mark.parametrize("reached", [[0], [0, 2]], ids=["one", "two"])
def test_stages_leave_out_the_same(reached: list[int], split: bool, count: int) -> None:
    """In two stages and in micro-batches zeros are sent, but nothing is made from them."""
    model = Several()
    leaves = model(X)
    tangents = [torch.randn(6, 6, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    torch.autograd.backward([leaves[n] for n in reached], [tangents[n] for n in reached])
    cut, mesh = micro_batches(annotate(capture(Several(), (X,))), count, staged=True), Mesh((2,))
    roles = [role for role in cut.inputs if role.kind == "tangent"]
    there = [role.node for role in roles if role.index in reached]
    gone = [role.node for role in roles if role.index not in reached]
    values = {role.node: value for role, value in zip(cut.inputs, [*model.parameters(), X], strict=False)}
    values |= {role.node: tangents[role.index] * (role.index in reached) for role in roles}
    for seed in range(2):
        plan = seeded_plan(cut, mesh, seed)
        programs = [lower(cut, plan, coordinate, run=False, improved=False) for coordinate in mesh.coordinates()]
        stages = assign_stages(cut, ("other",))
        staged = [cut_stages(program, stages, 2, count, split_backward=split) for program in programs]
        improve_stages(staged, mesh, None)
        narrow = [leave_out_in_stages(s, p.joint.graph, there, gone) for s, p in zip(staged, programs, strict=True)]
        schedule = make_schedule("zero_bubble" if split else "gpipe", 2, count, 1)
        found = simulate_pipeline(programs, narrow, schedule, values, later=True).values
        parameters = dict(model.named_parameters())
        for role, value in zip(cut.outputs, found, strict=True):
            if role.kind == "gradient":
                assert value is not None
                grad = parameters[role.name].grad
                torch.testing.assert_close(value, torch.zeros_like(value) if grad is None else grad)
