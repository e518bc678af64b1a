"""Runs the lowered program of one rank as one autograd step on real tensors and process groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from autopar.errors import InputError, LoweringError
from autopar.passes.improve.setting import Setting
from autopar.passes.improve.write_in_place import written_arguments
from autopar.passes.leave_out_tangents import leave_out_tangents
from autopar.passes.local_program import LocalProgram
from autopar.passes.program import Input, Output, Program, outputs_behind_gradients
from autopar.passes.torch_private import clear_saved_tensors, graph_is_kept
from autopar.placement import REPLICATE, Layout, local_shape, to_dtensor
from autopar.plans import Plan
from autopar.runtime.accumulation import Accumulation, Holding, WaitingBackward, earlier_sums, may_wait, settle
from autopar.runtime.beside_loss import Again, Widen
from autopar.runtime.compile_segments import compile_segments
from autopar.runtime.gate import Gate
from autopar.runtime.groups import MeshGroups, bind_groups
from autopar.runtime.hand_over import hand_over
from autopar.runtime.kept_copies import KeptCopies, take_out_gathers
from autopar.runtime.own_memory import Owned, contiguous_copy, lone_results
from autopar.runtime.randomness import draws_randomness, shared_randomness
from autopar.runtime.state import as_dtensor, as_dtensor_like, local_of
from autopar.runtime.tangents import Tangents
from autopar.runtime.updates import Updates
from autopar.runtime.versions import Versions, require_unchanged


@dataclass(frozen=True)
class Slot:
    """One placeholder of the forward: its role, and the local tensor that it takes."""

    role: Input
    layout: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Result:
    """One tensor that a half of the program returns: its role, its layout, its global shape."""

    role: Output
    layout: Layout
    shape: tuple[int, ...]


class Executable:
    """A program that runs on this rank.

    Attributes:
        program: the global program, for roles and specs.
        plan: the plan that it was lowered by.
        local: the lowered program.
        random: it draws random numbers.
        versions: of the parameters that the backward reads as they rest.
        widen: makes the executable of the same calls that differentiates the outputs beside the loss too.
        holding: tells whether all gradients wait.
    """

    def __init__(
        self, program: Program, plan: Plan, local: LocalProgram, groups: MeshGroups, *, compiled: bool = False
    ) -> None:
        self.program = program
        self.plan = plan
        self.local = local
        self.random = draws_randomness(program)
        self._groups = groups
        self._names = groups.names
        self._compiled = compiled
        gather, forward, kept = take_out_gathers(local.forward, plan.saved)
        self._gather = None if gather is None else bind_groups(gather, self._names, groups.device)
        self._kept = KeptCopies()
        self._gate = Gate()
        self._forward = self._ready(forward, self._gate)
        self._backward = None if local.backward is None else self._ready(local.backward)
        placeholders = [node for node in local.forward.graph.nodes if node.op == "placeholder"]
        roles = [role for role in local.inputs if role.kind != "tangent"]
        if len(placeholders) != len(roles):
            raise LoweringError(f"the forward takes {len(placeholders)} tensors, but the program has {len(roles)}")
        self.slots = tuple(
            Slot(role, local.input_layouts[role.node], tuple(node.meta["val"].shape), node.meta["val"].dtype)
            for role, node in zip(roles, placeholders)
        )
        self.versions = Versions(local, [slot.role.name for slot in self.slots])
        self._kept_slots = [i for i, slot in enumerate(self.slots) if slot.role.node in kept]
        self._returns = self._results("output", "buffer")
        self._returns_of_module = [result for result in self._returns if result.role.kind == "output"]
        self._gradients = self._results("gradient")
        self._gradient_slots = self._find_gradients()
        self._behind = outputs_behind_gradients(program)
        leaves = [result.role for result in self._returns_of_module]
        self._tangents = Tangents(local, leaves, groups.device)
        self._beside = [leaf.differentiable and leaf.index not in self._tangents.indices for leaf in leaves]
        self.widen: Widen | None = None
        self._patterns: dict[tuple[int, Layout], DTensor] = {}
        self._accumulation = Accumulation()
        self.holding = Holding()
        self._waiting: dict[bool, WaitingBackward | None] = {}
        self._narrow: dict[tuple[str, ...], tuple[fx.GraphModule, tuple[bool, ...]]] = {}
        self._parameter_slots = [i for i, slot in enumerate(self.slots) if slot.role.kind == "parameter"]
        for result in self._returns:
            if result.role.kind == "buffer" and result.layout != local.input_layouts[result.role.of]:
                raise LoweringError(f"the new value of {result.role.name} does not lie as the old one does")
        self._updates = Updates(program)
        self._updated = [slot.role.node in self._updates.nodes for slot in self.slots]

    def _ready(self, half: fx.GraphModule, gate: Gate | None = None) -> fx.GraphModule:
        """Return a half of the program as it runs here; it passes the gate before its first collective."""
        if gate is not None and not self._compiled:
            half = gate.built_into(half)
        bound = bind_groups(
            half, self._names, self._groups.device, boards=self._groups.boards, eager=not self._compiled
        )
        return compile_segments(bound) if self._compiled else bound

    def _results(self, *kinds: str) -> list[Result]:
        nodes = self.program.nodes()
        pairs = zip(self.local.outputs, self.local.output_layouts)
        out = []
        for role, layout in pairs:
            if role.kind in kinds and role.node is not None:
                out.append(Result(role, layout or (), tuple(nodes[role.node].meta["val"].shape)))
        return out

    def _find_gradients(self) -> list[int | None]:
        position = {result.role.of: i for i, result in enumerate(self._gradients)}
        return [position.get(slot.role.node) for slot in self.slots]

    def random_state(self, keep_own: bool) -> AbstractContextManager[None]:
        """Return the context that ``run`` needs: the first rank's random state, if the program draws at all."""
        return shared_randomness(self._groups, keep_own) if self.random else nullcontext()

    def run(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        leaves: Sequence[Any],
        agree: Callable[[], None],
    ) -> list[Any]:
        """Run one forward and return the flat output leaves; buffers are updated in place.

        Args:
            parameters: full name -> parameter.
            buffers: full name -> buffer.
            leaves: the flat leaves of the call; those that the model writes to are updated in place.
            agree: as ``rendezvous.meet`` returns it; called before the first collective.

        Raises:
            InputError: a tensor has another local shape or dtype than the program was lowered for.
        """
        self._gate.set(agree)
        self._updates.require_own_memory(leaves)
        tensors = []
        for slot, updated in zip(self.slots, self._updated):
            tensor = self._tensor_for(slot, parameters, buffers, leaves)
            tensors.append(tensor.clone() if updated else tensor)
        news: list[Tensor] = []
        if self._backward is None:
            with torch.no_grad():
                values = self._place(self.run_forward([t.detach() for t in self.with_copies(tensors)], news)[0])
        else:
            values = _Step.apply(self, news, *tensors)
        self._updates.write(news, buffers, leaves)
        out: list[Any] = []
        stream = iter(values)
        for role in self.local.outputs:
            if role.kind == "output":
                out.append(role.constant if role.node is None else next(stream))
        return out

    def _tensor_for(
        self, slot: Slot, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], leaves: Sequence[Any]
    ) -> Tensor:
        role = slot.role
        if role.kind == "parameter":
            tensor = parameters[role.name]
        elif role.kind == "buffer":
            tensor = buffers[role.name]
        else:
            tensor = leaves[role.index]
        local = local_of(tensor)
        if tuple(local.shape) != slot.shape or local.dtype != slot.dtype:
            raise InputError(
                f"{role.name} is {local.dtype}{list(local.shape)} on this rank, but the program was made for "
                f"{slot.dtype}{list(slot.shape)}; convert the model before parallelize, and pass inputs of one dtype"
            )
        return tensor

    @property
    def kept_copies(self) -> list[Tensor]:
        """The gathered copies of parameters that are held from one call to the next."""
        return self._kept.held

    def with_copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the local pieces of the forward's arguments, and the kept copies of its parameters."""
        copies: list[Tensor] = []
        if self._gather is not None:
            self._gate.open()
            copies = self._kept.of([tensors[index] for index in self._kept_slots], self._gather)
        return [local_of(tensor) for tensor in tensors] + copies

    def run_forward(self, tensors: list[Tensor], news: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Run the forward graph on local tensors; append new buffer values to ``news``; return outputs and saved.

        The list of tensors is emptied.
        """
        with torch.autocast(self._groups.device.type, enabled=False):
            if self._compiled:
                self._gate.open()
            values = list(self._forward(tensors))
        count = len(self._returns)
        outputs: list[Tensor] = []
        for result, value in zip(self._returns, values[:count]):
            (news if result.role.kind == "buffer" else outputs).append(value)
        return outputs, values[count:]

    def _place(self, values: list[Tensor]) -> list[Tensor]:
        """Return output leaves as the user sees them: full plain tensors, or DTensors where they lie."""
        out: list[Tensor] = []
        seen: set[int] = set()
        for result, value in zip(self._returns_of_module, values):
            if id(value) in seen:
                value = torch.ops.aten.alias.default(value)
            seen.add(id(value))
            out.append(as_dtensor(value, result.layout, result.shape, self._groups) if self._lies(result) else value)
        return out

    def _lies(self, result: Result) -> bool:
        if result.role.index == self.program.loss:
            return False
        mode = self.plan.options.outputs
        lies = mode == "lie" or (mode == "auto" and self.program.loss is not None)
        if not lies and any(code != REPLICATE for code in result.layout):
            raise LoweringError(f"the output {result.role.name} should be whole, but the plan leaves it split")
        return lies

    def differentiable(self) -> list[bool]:
        """Tell for every output tensor whether autograd may see it as computed from the inputs."""
        return [result.role.differentiable for result in self._returns_of_module]

    def _waiting_form(self, scattered: bool) -> WaitingBackward | None:
        """Return the backward whose gradients wait for those of later ones, made when it is first needed."""
        if scattered not in self._waiting:
            setting = Setting(self.plan.mesh, (), ())
            self._waiting[scattered] = WaitingBackward.of(
                self.local, self._gradient_slots, self._ready, setting, scattered=scattered
            )
        return self._waiting[scattered]

    def _patterns_of(self, form: WaitingBackward) -> list[DTensor]:
        return [self._pattern(position, result) for position, result in self._sums(form).items()]

    def parameters_of(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the parameters among the arguments of the forward, by position."""
        return {index: tensors[index] for index in self._parameter_slots}

    def again(self, tensors: Sequence[Tensor]) -> Again | None:
        """Return what a forward has to leave to run again; None if no gradient can make that necessary."""
        if self.widen is None or not any(self._beside):
            return None
        return Again.of([slot.role.name for slot in self.slots], tensors, self._groups.device, random=self.random)

    def is_wider_wanted(self, gradients: Sequence[Tensor | None]) -> bool:
        """Tell whether a gradient reached an output that is not differentiated."""
        return any(beside and gradient is not None for beside, gradient in zip(self._beside, gradients))

    def run_backward(
        self, saved: list[Tensor], gradients: Sequence[Tensor | None], parameters: Mapping[int, Tensor]
    ) -> list[Tensor | None]:
        """Return one gradient a placeholder of the forward, from the gradients that reached the outputs.

        None stands where none of the outputs that a gradient comes from was reached, as on one device.

        The list of saved tensors is emptied: each is freed after its last use, unless somebody else holds it.

        Args:
            saved: as the forward returned them.
            gradients: of the outputs.
            parameters: as ``parameters_of`` returns them, for sums that earlier backwards left in their gradients.

        Raises:
            InputError: a gradient reached an output that is not differentiated.
        """
        assert self._backward is not None
        backward, results, tangents = self._backward, self._gradients, self._tangents.local(gradients)
        reached = self._tangents.reached(gradients)
        held: tuple[int, ...] = ()
        lone = self._lone
        there, missing = self._tangents.named(reached)
        more_follow = self._accumulation.more_follow() and True not in self._waiting  # or the user says which wait
        if missing:
            backward, lone = self._without(there, missing)
        elif self.holding.on or more_follow:
            form = self._waiting_form(self.holding.on)
            waiting = [parameters[slot] for slot in form.slots] if form is not None else []
            if form is not None and may_wait(waiting, self._patterns_of(form), self.holding):
                backward, lone = form.without, form.lone
                results = [self._sums(form).get(position, result) for position, result in enumerate(results)]
        else:
            for form in filter(None, (self._waiting.get(True), self._waiting.get(False))):
                earlier = earlier_sums([parameters[slot] for slot in form.slots], self._patterns_of(form))
                if earlier is not None:
                    backward, held = form.resumed, form.slots
                    tangents += earlier
                    break
        own = None if all(lone) else Owned([*saved, *tangents])
        arguments = [*saved, *tangents]
        if graph_is_kept():
            for written in self._written:
                arguments[written] = arguments[written].clone()
        saved.clear()
        tangents.clear()
        with torch.autocast(self._groups.device.type, enabled=False):
            values: list[Any] = list(backward(arguments))
        out: list[Tensor | None] = []
        for number, (slot, position) in enumerate(zip(self.slots, self._gradient_slots)):
            behind = self._behind.get(slot.role.node)
            if position is None or (behind and not behind & reached and number not in held):
                out.append(None)
                continue
            value, values[position] = values[position], None
            if own is not None and not lone[position]:
                value = own.take(value)
            elif not value.is_contiguous():
                value = contiguous_copy(value)
            out.append(self._outgoing(position, slot, results[position], value))
        return out

    def _without(self, there: tuple[str, ...], missing: tuple[str, ...]) -> tuple[fx.GraphModule, tuple[bool, ...]]:
        """Return the backward without what only ``missing`` tangents lead to, and which of its results lie alone."""
        known = self._narrow.get(missing)
        if known is None:
            assert self.local.backward is not None
            half = leave_out_tangents(self.local.backward, there, missing)
            known = self._ready(half), lone_results(half, Setting(self.plan.mesh, (), ()))
            self._narrow[missing] = known
        return known

    @cached_property
    def _written(self) -> tuple[int, ...]:
        """The saved tensors that a backward writes into."""
        assert self.local.backward is not None
        return written_arguments(self.local.backward)

    @cached_property
    def _lone(self) -> tuple[bool, ...]:
        """Tell of every gradient whether it lies alone in memory; those with earlier sums added lie as they do."""
        assert self.local.backward is not None
        return lone_results(self.local.backward, Setting(self.plan.mesh, (), ()))

    def _sums(self, form: WaitingBackward) -> dict[int, Result]:
        """Return what the backward gives in the place of gradients that wait, by position: sums on each rank."""
        return {at: replace(self._gradients[at], layout=layout) for at, layout in form.layouts.items()}

    def _pattern(self, position: int, result: Result) -> DTensor:
        """Return a DTensor without data that lies as a gradient does."""
        pattern = self._patterns.get((position, result.layout))
        if pattern is None:
            mesh = self._groups.mesh
            shape = local_shape(result.shape, result.layout, mesh.sizes, self.local.coordinate)
            val = self.program.nodes()[str(result.role.node)].meta["val"]
            pattern = as_dtensor(
                torch.empty(shape, dtype=val.dtype, device="meta"), result.layout, result.shape, self._groups
            )
            self._patterns[position, result.layout] = pattern
        return pattern

    def _outgoing(self, position: int, slot: Slot, result: Result, value: Tensor) -> Tensor:
        if slot.role.kind != "parameter" and result.layout == slot.layout:
            return value
        placed = as_dtensor_like(value, self._pattern(position, result))
        if result.layout != slot.layout and result is self._gradients[position]:
            placed = placed.redistribute(placements=to_dtensor(slot.layout))
        return placed if slot.role.kind == "parameter" else placed.to_local()


class _Step(torch.autograd.Function):
    """One forward of a program, and its backward."""

    @staticmethod
    def forward(ctx: Any, executable: Executable, news: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.again = executable.again(tensors)
        outputs, saved = executable.run_forward(executable.with_copies(tensors), news)
        ctx.executable = executable
        ctx.versions = executable.versions.of(tensors, saved)
        ctx.parameters = executable.parameters_of(tensors)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        placed = executable._place(outputs)
        flags = executable.differentiable()
        ctx.mark_non_differentiable(*[value for value, flag in zip(placed, flags) if not flag])
        return tuple(placed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)  # raises when they were freed by an earlier backward
        require_unchanged(ctx.versions)
        executable, again = ctx.executable, ctx.again
        clear_saved_tensors(ctx)
        if not graph_is_kept():
            ctx.again = None
        if again is not None and executable.is_wider_wanted(gradients):
            saved.clear()
            given = again.gradients(executable.widen(), gradients)
        else:
            given = executable.run_backward(saved, gradients, ctx.parameters)
        settle(given, ctx.parameters)
        hand_over(given, ctx.parameters, ctx.next_functions)
        return (None, None, *given)
