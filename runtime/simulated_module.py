"""A module that runs every rank of its plan in this process, with whole parameters, under ordinary autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from autopar.errors import InputError
from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.leave_out_tangents import leave_out_tangents
from autopar.passes.local_program import LocalProgram
from autopar.passes.lower import lower_ranks
from autopar.passes.program import Program, outputs_behind_gradients
from autopar.plans import Plan

from .signature import Call, Signature, take_apart
from .simulate import assemble, global_shape, run_lockstep, shard
from .situation import Situation, without_data
from .updates import Updates

Planner = Callable[[Program, Mesh], Plan]
"""``planner(program, mesh)`` returns the plan that a program shall run by."""


@dataclass(frozen=True)
class _Simulation:
    program: Program
    plan: Plan
    ranks: list[LocalProgram]
    widen: Callable[[], _Simulation]


class SimulatedModule(nn.Module):
    """The original module's parameters and buffers, whole; a forward and backward that run all ranks in lock-step.

    What a loop does with the original (losses outside, hooks on gradients, optimizers, several forwards) it can do
    with this.

    Args:
        model: the original; its parameters and buffers are used, not copied.
        mesh: the ranks.
        planner: finds the plan of every program that a call needs.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, planner: Planner) -> None:
        super().__init__()
        self.original = model
        self._mesh = mesh
        self._planner = planner
        self._simulations: dict[Signature, _Simulation] = {}

    @property
    def plans(self) -> list[Plan]:
        """The plans of all programs that calls have needed so far."""
        return [simulation.plan for simulation in self._simulations.values()]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Return the original's parameters under their own names."""
        return self.original.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        """Return the original's buffers under their own names."""
        return self.original.named_buffers(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the call on every rank; buffers are updated in place."""
        call = take_apart(self.original, args, kwargs, None)
        simulation = self._simulations.get(call.signature)
        if simulation is None:
            simulation = self._simulate(without_data(call), Situation.of(self.original))
        return self._run(simulation, call.leaves)

    def _simulate(self, call: Call, situation: Situation, every_output: bool = False) -> _Simulation:
        gradient = call.signature.gradient
        with situation.again(self.original), torch.set_grad_enabled(gradient):
            captured = capture(self.original, call.args, call.kwargs, training=gradient, every_output=every_output)
        program = annotate(captured)
        plan = self._planner(program, self._mesh)
        widen = functools.cache(functools.partial(self._simulate, call, situation, True))
        made = _Simulation(program, plan, lower_ranks(program, plan, run=False), widen)
        self._simulations[call.signature] = made
        return made

    def _run(self, simulation: _Simulation, leaves: Sequence[Any]) -> Any:
        program = simulation.program
        parameters = dict(self.original.named_parameters(remove_duplicate=False))
        buffers = dict(self.original.named_buffers(remove_duplicate=False))
        feeds: list[Tensor] = []
        for role in program.inputs:
            if role.kind == "parameter":
                feeds.append(parameters[role.name])
            elif role.kind == "buffer":
                feeds.append(buffers[role.name].clone())
            elif role.kind == "input":
                feeds.append(leaves[role.index])
        updates = Updates(program)
        updates.require_own_memory(leaves)
        kept = [role.node for role in program.inputs if role.kind != "tangent"]
        feeds = [feed.clone() if node in updates.nodes else feed for node, feed in zip(kept, feeds)]
        news: list[Tensor] = []
        if simulation.ranks[0].backward is None:
            with torch.no_grad():
                values = _forward(simulation, feeds, news)[0]
        else:
            values = list(_Step.apply(simulation, news, *feeds))
        updates.write(news, buffers, leaves)
        stream = iter(values)
        out = [r.constant if r.node is None else next(stream) for r in program.outputs if r.kind == "output"]
        return pytree.tree_unflatten(out, program.out_spec)


def _forward(
    simulation: _Simulation, feeds: Sequence[Tensor], news: list[Tensor]
) -> tuple[list[Tensor], list[list[Tensor]]]:
    first, mesh = simulation.ranks[0], simulation.plan.mesh
    layouts = [first.input_layouts[role.node] for role in first.inputs if role.kind != "tangent"]
    arguments = [
        [shard(tensor, layout, mesh, rank.coordinate) for tensor, layout in zip(feeds, layouts)]
        for rank in simulation.ranks
    ]
    results = run_lockstep([rank.forward for rank in simulation.ranks], arguments, mesh)
    count = len(results[0]) - first.num_saved
    returned = [(r, a) for r, a in zip(first.outputs, first.output_layouts) if r.kind != "gradient" and r.node]
    outputs: list[Tensor] = []
    for index, (role, layout) in enumerate(returned):
        pieces = [result[index] for result in results]
        whole = assemble(pieces, layout or (), global_shape(pieces, layout or (), mesh), mesh, role.name)
        (news if role.kind == "buffer" else outputs).append(whole)
    return outputs, [list(result[count:]) for result in results]


def _backward(
    simulation: _Simulation, saved: Sequence[Sequence[Tensor]], tangents: Sequence[Tensor], missing: Sequence[str]
) -> dict[str, Tensor]:
    first, mesh = simulation.ranks[0], simulation.plan.mesh
    layouts = [first.input_layouts[role.node] for role in first.inputs if role.kind == "tangent"]
    arguments = [
        [*kept, *(shard(t, layout, mesh, rank.coordinate) for t, layout in zip(tangents, layouts))]
        for rank, kept in zip(simulation.ranks, saved)
    ]
    halves = [rank.backward for rank in simulation.ranks if rank.backward is not None]
    if missing:
        names = [role.node for role in first.inputs if role.kind == "tangent" and role.node not in missing]
        halves = [leave_out_tangents(half, names, missing) for half in halves]
    results = run_lockstep(halves, arguments, mesh)
    returned = [(r, a) for r, a in zip(first.outputs, first.output_layouts) if r.kind == "gradient" and r.node]
    gradients = {}
    for index, (role, layout) in enumerate(returned):
        pieces = [result[index] for result in results]
        shape = global_shape(pieces, layout or (), mesh)
        gradients[role.of] = assemble(pieces, layout or (), shape, mesh, f"the gradient of {role.name}")
    return gradients


@dataclass(frozen=True)
class _Again:
    """What a call needs to run again, when a gradient has reached an output beside its loss."""

    names: list[str]
    feeds: tuple[Tensor, ...]
    versions: list[int]
    state: Tensor

    @classmethod
    def of(cls, simulation: _Simulation, feeds: tuple[Tensor, ...]) -> _Again:
        names = [role.name for role in simulation.program.inputs if role.kind != "tangent"]
        return cls(names, feeds, [tensor._version for tensor in feeds], torch.get_rng_state())

    def saved(self, simulation: _Simulation) -> list[list[Tensor]]:
        changed = [n for n, t, version in zip(self.names, self.feeds, self.versions) if t._version != version]
        if changed:
            raise InputError(
                f"{changed[0]} was changed in place between the forward and a backward that needs it again"
            )
        with torch.random.fork_rng(devices=()):
            torch.set_rng_state(self.state)
            return _forward(simulation, self.feeds, [])[1]


class _Step(torch.autograd.Function):
    """One lock-step forward of all ranks, and its backward."""

    @staticmethod
    def forward(ctx: Any, simulation: _Simulation, news: list[Tensor], *feeds: Tensor) -> tuple[Tensor, ...]:
        ctx.again = _Again.of(simulation, feeds)
        outputs, saved = _forward(simulation, feeds, news)
        ctx.simulation = simulation
        ctx.saved = saved
        ctx.set_materialize_grads(False)
        leaves = [role for role in simulation.program.outputs if role.kind == "output" and role.node]
        ctx.leaves = [role.index for role in leaves]
        ctx.mark_non_differentiable(*[value for value, role in zip(outputs, leaves) if not role.differentiable])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        simulation: _Simulation = ctx.simulation
        saved = ctx.saved
        reached = {index: gradient for index, gradient in zip(ctx.leaves, gradients) if gradient is not None}
        if not reached.keys() <= {role.index for role in simulation.program.inputs if role.kind == "tangent"}:
            simulation = simulation.widen()
            saved = ctx.again.saved(simulation)
        program, nodes = simulation.program, simulation.program.nodes()
        tangents = []
        for role in program.inputs:
            if role.kind == "tangent":
                val = nodes[role.node].meta["val"]
                gradient = reached.get(role.index)
                tangents.append(torch.zeros(val.shape, dtype=val.dtype) if gradient is None else gradient.to(val.dtype))
        missing = [role.node for role in program.inputs if role.kind == "tangent" and role.index not in reached]
        found = _backward(simulation, saved, tangents, missing)
        behind = outputs_behind_gradients(program)
        feeds = [role.node for role in program.inputs if role.kind != "tangent"]
        none = {node for node in feeds if behind.get(node) and not behind[node] & reached.keys()}
        return (None, None, *(None if node in none else found.get(node) for node in feeds))
