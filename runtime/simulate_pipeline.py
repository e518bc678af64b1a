"""Run every rank of a pipeline in one process: stages take turns as their messages arrive, ranks of a stage in step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.errors import LoweringError
from autopar.passes.local_program import LocalProgram
from autopar.passes.micro_batches import INDEX
from autopar.passes.schedules import Schedule
from autopar.passes.stage_pieces import StagedProgram
from autopar.placement import Layout

from .pipeline import Stage, Value, take_step
from .pipeline_random import starts_of_stages
from .pipeline_steps import Step, step_order
from .simulate import Moved, StepResult, assemble, global_shape, reduce_pair, run_lockstep, shard


class SimulatedEngine:
    """Runs a segment on all ranks of a stage at once.

    Args:
        staged: the program of every rank of a stage, in rank order.
        programs: what they were cut from.
        moved: takes every collective that runs.
    """

    def __init__(self, staged: Sequence[StagedProgram], programs: Sequence[LocalProgram], moved: list[Moved]) -> None:
        self.staged, self.mesh, self.moved = staged, programs[0].mesh, moved
        self.starts: dict[int, torch.Tensor] = {}

    def run(self, stage: int, when: str, arguments: list[Value]) -> list[Value]:
        """Run a segment in lock-step."""
        modules = [one.stages[stage].segments[when].graph_module for one in self.staged]
        feeds = [[argument[rank] for argument in arguments] for rank in range(len(modules))]
        arguments.clear()
        results = run_lockstep(modules, feeds, self.mesh, moved=self.moved)
        return [list(values) for values in zip(*results)]

    def reduce(self, op: str, one: Value, other: Value) -> Value:
        """Return the sum, maximum, ... on every rank."""
        return [reduce_pair(op, a, b) for a, b in zip(one, other, strict=True)]

    def join(self, parts: list[Value], dim: int) -> Value:
        """Return the parts side by side on every rank."""
        return [torch.cat(list(pieces), dim) for pieces in zip(*parts, strict=True)]

    def number(self, micro_batch: int) -> Value:
        """Return the number of a micro-batch on every rank."""
        return [torch.tensor(micro_batch) for _ in self.staged]

    def enter_forward(self, stage: int) -> None:
        """Set the generator to where the numbers of a stage's forward start."""
        if stage in self.starts:
            torch.set_rng_state(self.starts[stage])


class Letters:
    """Messages in a dict; each is taken once."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, str, int, str], list[Value]] = {}

    def send(self, step: Step, values: list[Value]) -> None:
        """Put a message down for the neighbour."""
        to = step.stage + (1 if step.direction == "down" else -1)
        self.held[to, step.when, step.micro_batch, step.direction] = values

    def receive(self, step: Step, names: Sequence[str]) -> list[Value] | None:
        """Take a message up."""
        return self.held.pop((step.stage, step.when, step.micro_batch, step.direction), None)


def simulate_pipeline(
    programs: Sequence[LocalProgram],
    staged: Sequence[StagedProgram],
    schedule: Schedule,
    values: Mapping[str, torch.Tensor],
    *,
    later: bool = False,
) -> StepResult:
    """Run one step on global ``values`` and assemble what comes out.

    Args:
        programs: the lowered program of every rank of a stage, in rank order.
        staged: the same, cut by ``cut_stages``.
        schedule: the table.
        values: placeholder name -> global tensor; tangents too, and without ``micro_batch``.
        later: the gradients of the outputs are known after the forward only.

    Raises:
        LoweringError: the stages wait for each other for ever.
    """
    first, mesh = staged[0], programs[0].mesh
    moved: list[Moved] = []
    engine = SimulatedEngine(staged, programs, moved)
    draws = first.draws
    if draws:
        engine.starts, end_state = starts_of_stages(first, torch.device("cpu"))
    stages = [
        Stage(first, index, engine, _values(pieces.placeholders, programs, values))
        for index, pieces in enumerate(first.stages)
    ]
    has_tangents = any(role.kind == "tangent" for role in first.inputs)
    gradients = "none" if not has_tangents else "later" if later else "at once"
    orders = [step_order(first, schedule, rank, gradients=gradients) for rank in range(schedule.num_ranks)]
    letters = Letters()
    _take_turns([order.forward for order in orders], dict(enumerate(stages)), letters)
    _take_turns([order.backward for order in orders], dict(enumerate(stages)), letters)
    if draws:
        torch.set_rng_state(end_state)
    if letters.held:
        raise LoweringError(f"messages that nobody takes: {sorted(letters.held)}")
    return _result(programs, first, stages, moved, mesh)


def _values(
    names: Sequence[str], programs: Sequence[LocalProgram], values: Mapping[str, torch.Tensor]
) -> dict[str, Value]:
    out: dict[str, Value] = {}
    for name in names:
        if name != INDEX:
            layout = programs[0].input_layouts[name]
            out[name] = [shard(values[name], layout, program.mesh, program.coordinate) for program in programs]
    return out


def _take_turns(orders: Sequence[Sequence[Step]], stages: Mapping[int, Stage], letters: Letters) -> None:
    at = [0 for _ in orders]
    while True:
        before = list(at)
        for rank, order in enumerate(orders):
            while at[rank] < len(order) and take_step(order[at[rank]], stages, letters):
                at[rank] += 1
        if all(place == len(order) for place, order in zip(at, orders)):
            return
        if at == before:
            stuck = [str(order[place]) for place, order in zip(at, orders) if place < len(order)]
            raise LoweringError(f"the ranks of the pipeline wait for each other: {'; '.join(stuck)}")


def _result(
    programs: Sequence[LocalProgram], staged: StagedProgram, stages: Sequence[Stage], moved: list[Moved], mesh: Any
) -> StepResult:
    whole: list[torch.Tensor | None] = []
    local: list[list[torch.Tensor | None]] = [[] for _ in programs]
    layouts: Sequence[Layout | None] = programs[0].output_layouts
    nodes = programs[0].joint.graph.output_node().args[0]
    for role, place, layout, node in zip(staged.outputs, staged.output_stage, layouts, nodes):  # type: ignore[arg-type]
        if place is None or layout is None or role.node is None:
            whole.append(None)
            for kept in local:
                kept.append(None)
            continue
        held = stages[place].value(node.name)
        whole.append(assemble(held, layout, global_shape(held, layout, mesh), mesh, f"the {role.kind} {role.name}"))
        for kept, piece in zip(local, held):
            kept.append(piece)
    return StepResult(whole, local, moved)
