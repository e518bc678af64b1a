"""A program in micro-batches and stages, as one autograd step of this rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.errors import InputError
from autopar.passes.leave_out_tangents import leave_out_in_stages
from autopar.passes.local_program import LocalProgram
from autopar.passes.micro_batches import INDEX
from autopar.passes.pipeline_plan import schedule_of
from autopar.passes.program import Input, Program, outputs_behind_gradients
from autopar.passes.stage_pieces import ADDING, BACKWARD, END, TURN, WEIGHT, StagedProgram
from autopar.placement import REPLICATE, Layout, to_dtensor
from autopar.plans import Plan
from autopar.runtime.hand_over import hand_over
from autopar.runtime.own_memory import Owned
from autopar.runtime.pipeline import Stage, take_step
from autopar.runtime.pipeline_processes import Mail, ProcessEngine, owners, spread
from autopar.runtime.pipeline_random import starts_of_stages
from autopar.runtime.pipeline_steps import Step, StepOrder, step_order
from autopar.runtime.randomness import draws_randomness, set_generator_state, shared_randomness
from autopar.runtime.stage_groups import StageGroups
from autopar.runtime.state import as_dtensor, local_of


class StagedExecutable:
    """A program that runs on this rank's stages.

    Attributes:
        program: that of a micro-batch, for roles and specs.
        plan: the plan that it was lowered by.
        places: full name of a parameter -> place on the pipeline axis that keeps it.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        local: LocalProgram,
        staged: StagedProgram,
        groups: StageGroups,
        *,
        compiled: bool = False,
    ) -> None:
        assert plan.pipeline is not None
        self.program, self.plan, self.local, self.staged = program, plan, local, staged
        self._groups = groups
        has_tangents = any(role.kind == "tangent" for role in program.inputs)
        wanted = {role.index for role in program.inputs if role.kind == "tangent"}
        self.gradients = "none" if not has_tangents else "at once" if wanted == {program.loss} else "later"
        self._schedule = schedule_of(plan.pipeline, forward_only=not has_tangents)
        self._orders = [
            step_order(staged, self._schedule, place, gradients=self.gradients) for place in range(groups.num_places)
        ]
        self.places = owners(staged, self._schedule)
        self._mine = self._schedule.stages_of(groups.place)
        self._compiled = compiled
        self._engine = ProcessEngine(staged, self._mine, groups, compiled=compiled)
        self._narrow: dict[tuple[str, ...], ProcessEngine] = {}
        self.random = draws_randomness(program)
        needed = {name for stage in self._mine for name in staged.stages[stage].placeholders}
        self._slots = [
            role
            for role in program.inputs
            if (role.node in needed or role.requires_grad)
            and role.kind != "tangent"
            and role.name != INDEX
            and (role.kind != "parameter" or self._keeps(role.name))
        ]
        self._nodes = program.nodes()
        self._behind = outputs_behind_gradients(program)
        ends = local.joint.graph.output_node().args[0]
        self._end_names = [getattr(end, "name", None) for end in ends]  # type: ignore[union-attr]

    def _keeps(self, name: str) -> bool:
        return self.places.get(name) == self._groups.place

    def random_state(self, keep_own: bool) -> AbstractContextManager[None]:
        """Return the context that ``run`` needs: the first rank's random state, if the program draws at all."""
        return shared_randomness(self._groups.whole, keep_own) if self.random else nullcontext()

    def run(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        leaves: Sequence[Any],
        agree: Callable[[], None],
    ) -> list[Any]:
        """Run a step (with a loss: forwards and backwards) and return the flat output leaves.

        Args:
            parameters: full name -> parameter, of those that this rank keeps.
            buffers: full name -> buffer; updated in place.
            leaves: the flat leaves of the call.
            agree: as ``rendezvous.meet`` returns it.

        Raises:
            InputError: a tensor has another local shape or dtype than the program was lowered for.
        """
        agree()
        tensors = [self._tensor_for(role, parameters, buffers, leaves) for role in self._slots]
        news: dict[str, Tensor] = {}
        if self.gradients == "none":
            with torch.no_grad():
                values = _Call(self, tensors).forward(news)
        else:
            spark = torch.zeros((), requires_grad=True)  # a rank without parameters has a differentiable loss too
            values = list(_Step.apply(self, news, spark, *tensors))
        with torch.no_grad():
            for name, value in news.items():
                buffers[name].copy_(value)
        stream = iter(values)
        return [r.constant if r.node is None else next(stream) for r in self.program.outputs if r.kind == "output"]

    def _tensor_for(
        self, role: Input, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], leaves: Sequence[Any]
    ) -> Tensor:
        source: Any = {"parameter": parameters, "buffer": buffers}.get(role.kind, leaves)
        tensor: Tensor = source[role.index if role.kind == "input" else role.name]
        held, local = self._values[role.node], local_of(tensor)
        if tuple(local.shape) != tuple(held.shape) or local.dtype != held.dtype:
            raise InputError(
                f"{role.name} is {local.dtype}{list(local.shape)} on this rank, but the program was made for "
                f"{held.dtype}{list(held.shape)}; convert the model before parallelize, and pass inputs of one dtype"
            )
        return tensor.clone() if role.kind == "buffer" else tensor

    @cached_property
    def _values(self) -> dict[str, Tensor]:
        """The local tensors of placeholders and of what is handed out, by name, without data."""
        names = {name for name in self._end_names if name is not None}
        nodes = self.local.joint.graph.nodes
        return {node.name: node.meta["val"] for node in nodes if node.op == "placeholder" or node.name in names}

    def owned(self) -> list[Input]:
        """Return the roles of the tensors that a call of this rank differentiates or reads, in order."""
        return list(self._slots)

    def order(self) -> StepOrder:
        """Return what this rank does."""
        return self._orders[self._groups.place]

    def mail(self) -> Mail:
        """Return the messages of a new call."""
        return Mail(self.staged, self._schedule, self._groups, self._orders)

    def stages(self, values: Mapping[str, Tensor]) -> dict[int, Stage]:
        """Return this rank's stages for a new call."""
        out = {}
        for index in self._mine:
            names = self.staged.stages[index].placeholders
            own = {name: values[name] for name in names if name in values}
            out[index] = Stage(self.staged, index, self._engine, own)
        return out

    def engine_for(self, reached: Collection[int]) -> ProcessEngine:
        """Return what runs a backward that reached these outputs: nothing runs for others, as on one device."""
        roles = self.tangent_roles()
        missing = tuple(role.node for role in roles if role.index not in reached)
        if not missing:
            return self._engine
        if missing not in self._narrow:
            there = [role.node for role in roles if role.index in reached]
            staged = leave_out_in_stages(self.staged, self.local.joint.graph, there, missing)
            parts = (TURN, BACKWARD, WEIGHT, END, *ADDING.values())
            self._narrow[missing] = ProcessEngine(
                staged, self._mine, self._groups, compiled=self._compiled, parts=parts
            )
        return self._narrow[missing]

    def prepare_randomness(self) -> Tensor | None:
        """Let every stage know where its numbers start; return the state of the generator after all of them."""
        if not self.staged.draws:
            return None
        device = self._groups.stage.device
        self._engine.starts, after = starts_of_stages(self.staged, device)
        return after

    def restore_randomness(self, state: Tensor | None) -> None:
        """Leave the generator as one device would."""
        if state is not None:
            set_generator_state(self._groups.stage.device, state)

    def tangent_roles(self) -> list[Input]:
        """Return the roles of the outputs' gradients."""
        return [role for role in self.program.inputs if role.kind == "tangent"]

    def tangents(self, gradients: Mapping[int, Tensor | None]) -> dict[str, Tensor]:
        """Return placeholder -> gradient of an output, zeros where none came, from those by output position."""
        out = {}
        for role in self.tangent_roles():
            like = self._values[role.node]
            given = gradients.get(role.index)
            if given is None:
                out[role.node] = torch.zeros(like.shape, dtype=like.dtype, device=self._groups.stage.device)
            else:
                out[role.node] = given.to(like.dtype).contiguous()
        return out

    def collect(self, kind: str, stages: Mapping[int, Stage]) -> list[tuple[Any, Layout, Tensor]]:
        """Return role, layout and value of every output of a kind, on every rank. Collective along the line."""
        out = []
        rows = zip(self.program.outputs, self.staged.output_stage, self.local.output_layouts, self._end_names)
        for role, stage, layout, name in rows:
            if role.kind != kind or stage is None or layout is None or name is None:
                continue
            out.append((role, layout, self._spread(stages, stage, name)))
        return out

    def _spread(self, stages: Mapping[int, Stage], stage: int, name: str) -> Tensor:
        """Return a value that a stage made, on every rank of the line. Collective along it."""
        place = self._schedule.rank_of(stage)
        if place == self._groups.place:
            return spread(stages[stage].value(name), place, self._groups)
        like = self._values[name]
        return spread(torch.empty(like.shape, dtype=like.dtype, device=self._groups.stage.device), place, self._groups)

    def gradients_of_slots(
        self, stages: Mapping[int, Stage], given: Sequence[Tensor], reached: Collection[int]
    ) -> list[Tensor | None]:
        """Return one gradient for each of ``owned``. Collective along the line where an input wants a gradient.

        Args:
            given: tensors with which no gradient may share memory.
            reached: positions of the outputs that a gradient reached; what comes from none of them is None.
        """
        found = {node: value for node, _, value in self.collect_gradients(stages)}
        out: list[Tensor | None] = []
        taken = Owned(given)
        for slot in self._slots:
            behind = self._behind.get(slot.node)
            if slot.node not in found or (behind and behind.isdisjoint(reached)):
                out.append(None)
                continue
            value = taken.take(found[slot.node])
            if slot.kind == "parameter":
                shape = tuple(self._nodes[slot.node].meta["val"].shape)
                layout = self.local.input_layouts[slot.node]
                out.append(as_dtensor(value, layout, shape, self._groups.stage))
            else:
                out.append(value)
        return out

    def collect_gradients(self, stages: Mapping[int, Stage]) -> list[tuple[str, Layout, Tensor]]:
        """Return placeholder, layout and gradient: of the parameters of this rank, and of every input."""
        out = []
        rows = zip(self.program.outputs, self.staged.output_stage, self.local.output_layouts, self._end_names)
        for role, stage, layout, name in rows:
            if role.kind != "gradient" or stage is None or layout is None or name is None:
                continue
            if self.program.input_of(role.of).kind == "input":
                out.append((role.of, layout, self._spread(stages, stage, name)))
            elif self._schedule.rank_of(stage) == self._groups.place:
                out.append((role.of, layout, stages[stage].value(name)))
        return out

    def place_outputs(self, found: Sequence[tuple[Any, Layout, Tensor]]) -> list[Tensor]:
        """Return output leaves as the user sees them: full plain tensors, or DTensors where they lie."""
        out: list[Tensor] = []
        for role, layout, value in found:
            if all(code == REPLICATE for code in layout) and not self._lies(role.index):
                out.append(value)
            else:
                shape = tuple(self._nodes[role.node].meta["val"].shape)
                placed = as_dtensor(value, layout, shape, self._groups.stage)
                if not self._lies(role.index):
                    placed = placed.redistribute(placements=to_dtensor((REPLICATE,) * len(layout)))
                    out.append(placed.to_local())
                else:
                    out.append(placed)
        return out

    def parameters_of(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the parameters among the tensors of ``owned``, by position."""
        return {index: tensors[index] for index, slot in enumerate(self._slots) if slot.kind == "parameter"}

    def _lies(self, index: int) -> bool:
        mode = self.plan.options.outputs
        if index == self.program.loss:
            return False
        return mode == "lie" or (mode == "auto" and self.program.loss is not None)

    def differentiable(self, found: Sequence[tuple[Any, Layout, Tensor]]) -> list[bool]:
        """Tell for every output whether autograd may see it as computed from the inputs."""
        return [role.differentiable for role, _, _ in found]


class _Call:
    """One call: its stages, its messages, and where it stands."""

    def __init__(self, executable: StagedExecutable, tensors: Sequence[Tensor]) -> None:
        self.executable = executable
        values = {role.node: local_of(tensor).detach() for role, tensor in zip(executable.owned(), tensors)}
        self.stages = executable.stages(values)
        self.mail = executable.mail()
        self.given = list(values.values())
        self.found: list[tuple[Any, Layout, Tensor]] = []

    def forward(self, news: dict[str, Tensor]) -> list[Tensor]:
        """Run the first part; return the output leaves, and put new buffer values into ``news``."""
        executable = self.executable
        if executable.gradients == "at once":
            self._give({role.index: None for role in executable.tangent_roles()}, ones=True)
        after = executable.prepare_randomness()
        self._run(executable.order().forward)
        executable.restore_randomness(after)
        for role, _, value in executable.collect("buffer", self.stages):
            news[role.name] = value
        self.found = executable.collect("output", self.stages)
        return executable.place_outputs(self.found)

    def backward(self, gradients: Mapping[int, Tensor | None]) -> list[Tensor | None]:
        """Run the second part; return the gradients."""
        self._give(gradients)
        reached = [index for index, gradient in gradients.items() if gradient is not None]
        engine = self.executable.engine_for(reached)
        for stage in self.stages.values():
            stage.engine = engine
        self._run(self.executable.order().backward)
        return self.executable.gradients_of_slots(self.stages, self.given, reached)

    def _give(self, gradients: Mapping[int, Tensor | None], ones: bool = False) -> None:
        values = self.executable.tangents(gradients)
        if ones:
            values = {name: torch.ones_like(value) for name, value in values.items()}
        for stage in self.stages.values():
            stage.once.update(values)

    def _run(self, steps: Sequence[Step]) -> None:
        for step in steps:
            take_step(step, self.stages, self.mail)
        self.mail.close()


class _Step(torch.autograd.Function):
    """One call of a program with gradients."""

    @staticmethod
    def forward(
        ctx: Any, executable: StagedExecutable, news: dict[str, Tensor], spark: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        call = _Call(executable, tensors)
        placed = call.forward(news)
        ctx.set_materialize_grads(False)
        ctx.executable = executable
        ctx.parameters = executable.parameters_of(tensors)
        ctx.indices = [role.index for role, _, _ in call.found]
        ctx.gradients = (
            executable.gradients_of_slots(call.stages, call.given, [role.index for role in executable.tangent_roles()])
            if executable.gradients == "at once"
            else None
        )
        ctx.call = call if executable.gradients == "later" else None
        flags = executable.differentiable(call.found)
        ctx.mark_non_differentiable(*[value for value, flag in zip(placed, flags) if not flag])
        return tuple(placed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        executable: StagedExecutable = ctx.executable
        reached = {i: gradient for i, gradient in zip(ctx.indices, gradients) if gradient is not None}
        wanted = {role.index for role in executable.tangent_roles()}
        for index in reached:
            if index not in wanted:
                raise InputError(
                    "a gradient reached an output beside the loss, but only the loss is differentiated; use "
                    "outputs='full', put the term into the loss inside the module, or detach it"
                )
        if ctx.gradients is None and ctx.call is None:
            raise InputError("the backward of this call ran already; a step in micro-batches keeps nothing for another")
        if ctx.gradients is not None:
            made, ctx.gradients = ctx.gradients, None
            loss = executable.program.loss
            given = _scaled(made, None if loss is None else reached.get(loss))
        else:
            call, ctx.call = ctx.call, None
            given = call.backward(reached)
        hand_over(given, ctx.parameters, ctx.next_functions[1:])
        return (None, None, None, *given)


def _scaled(gradients: Sequence[Tensor | None], scale: Tensor | None) -> list[Tensor | None]:
    if scale is None:
        return [None for _ in gradients]
    factor = float(scale)
    return [gradient if gradient is None or factor == 1.0 else gradient * factor for gradient in gradients]
