"""Live bytes of one rank in a step of micro-batches and stages: predicted on forms, measured on tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
from torch import Tensor, fx

from autopar.errors import PlanError
from autopar.mesh import Coordinate
from autopar.passes.cost.live_bytes import optimizer_states, resting_form
from autopar.passes.cost.op_memory import Form
from autopar.passes.cost.storages import LiveBytes, kernels_of
from autopar.passes.cost.walk_graph import GraphWalk, numbers_of, own
from autopar.passes.local_program import LocalProgram
from autopar.passes.micro_batches import INDEX
from autopar.passes.pipeline_plan import cut_program, schedule_of, stage_pieces
from autopar.passes.program import Input, Program
from autopar.passes.schedules import Schedule
from autopar.passes.stage_pieces import BACKWARD, FORWARD, StagedProgram
from autopar.plans import MemoryTable, Plan

from .measure_memory import MakeOptimizer, MemoryMeter, stand_alone, state_tensors
from .own_memory import Owned
from .pipeline import Engine, Stage, Value, take_step
from .pipeline_steps import DOWN, RUN, Step, step_order
from .simulate import reduce_pair, shard

Mark = Callable[[str, Sequence[Value]], None]
"""``mark(kind, values)`` says what values are for, where nothing is said yet."""


def staged_live_bytes(program: Program, plan: Plan, coordinate: Coordinate | None = None, place: int = 0) -> LiveBytes:
    """Predict the most live bytes of a rank in one step of a plan with micro-batches or stages.

    Every segment is walked in the order of the schedule; what is held between them is what the executor holds.

    Args:
        program: of a micro-batch, as the plan was made for.
        plan: with a ``pipeline``.
        coordinate: the rank's place on the mesh inside a stage; the first by default.
        place: on the pipeline axis.
    """
    return _predict(_Rank.of(program, plan, coordinate, place), plan)


def predict_staged_memory(program: Program, plan: Plan) -> Plan:
    """Return a plan with micro-batches or stages with the memory table of its fullest rank; any other as it is.

    Args:
        program: of the whole batch.
    """
    if plan.pipeline is None:
        return plan
    cut = cut_program(program, plan.pipeline, plan.options.outputs)
    first = _Rank.of(cut, plan, None, 0)
    ranks = [replace(first, place=place) for place in range(plan.pipeline.ranks)]
    found = [_predict(rank, plan) for rank in ranks]
    place = max(range(len(found)), key=lambda index: found[index].peak_bytes)
    fullest = found[place]
    trained = [r for r in ranks[place].roles() if r.kind == "parameter" and r.requires_grad]
    gradients = sum(first.local_value(role.node).nbytes for role in trained)
    kept = [fullest.parts[kind] for kind in ("parameters", "optimizer", "buffers", "saved")]
    memory = MemoryTable(
        parameters_bytes=kept[0],
        gradients_bytes=gradients,
        optimizer_bytes=kept[1],
        buffers_bytes=kept[2],
        saved_bytes=kept[3],
        total_bytes=sum(kept) + gradients,
        inputs_bytes=fullest.parts["inputs"] + fullest.parts["outputs"],
        temporaries_bytes=fullest.parts["temporaries"],
        gather_bytes=fullest.largest_gather_bytes,
        peak_bytes=fullest.peak_bytes,
        peak_at=fullest.at,
    )
    return msgspec.structs.replace(plan, memory=memory)


def _predict(rank: _Rank, plan: Plan) -> LiveBytes:
    walk = GraphWalk(kernels_of(plan.mesh.device))
    roles = rank.roles()
    values = [rank.local_value(role.node) for role in roles]
    resting = {role.node: resting_form(walk, role, value) for role, value in zip(roles, values)}
    states = optimizer_states(walk, roles, values, plan.options.optimizer)
    copies = {r.node: walk.fresh(resting[r.node].meta(), r.node) for r in roles if r.kind == "buffer"}
    start = len(walk.account.events)
    tangents = {name: walk.fresh(value, name) for name, value in rank.tangents().items()}
    engine = _FormEngine(walk, rank.staged)
    post = _NoPost(rank, lambda value: walk.fresh(value, "a message"))
    stages = rank.step(engine, post, {**resting, **copies, **tangents}, walk.claim)
    outputs = rank.ends(stages, "output")
    walk.claim("outputs", outputs)
    gradients = own(walk, rank.ends(stages, "gradient"), numbers_of(list(resting.values())))
    found = walk.account.highest(start, walk.largest_gather_bytes)
    del states, outputs, gradients
    return found


def measure_staged_rank(
    program: Program,
    plan: Plan,
    values: Mapping[str, Tensor],
    optimizer: MakeOptimizer | None = None,
    *,
    coordinate: Coordinate | None = None,
    place: int = 0,
) -> LiveBytes:
    """Run one step of a single rank as the executor runs it, and return its most live bytes.

    Neither the other ranks of its stage nor other stages run: what they would send is made up.

    Args:
        program, plan, coordinate, place: as for ``staged_live_bytes``.
        values: placeholder name -> global tensor, without tangents.
        optimizer: makes one from the rank's trained parameters; a step before the measurement gives it its state.
    """
    rank = _Rank.of(program, plan, coordinate, place)
    meter = MemoryMeter(plan.mesh.device)
    roles, local = rank.roles(), rank.local
    pieces = {r.node: shard(values[r.node], local.input_layouts[r.node], local.mesh, local.coordinate) for r in roles}
    for role in roles:
        meter.hold(f"{role.kind}s", [pieces[role.node]])
    held = _with_state([pieces[r.node] for r in roles if r.kind == "parameter" and r.requires_grad], optimizer)
    if held is not None:
        meter.hold("optimizer", state_tensors(held))
    engine = _LoneEngine(rank.staged)
    meter.hold("buffers", engine.constants())
    with torch.no_grad(), meter:
        copies = {role.node: pieces[role.node].clone() for role in roles if role.kind == "buffer"}
        tangents = {name: torch.ones(value.shape, dtype=value.dtype) for name, value in rank.tangents().items()}
        post = _NoPost(rank, lambda value: torch.zeros(value.shape, dtype=value.dtype))
        stages = rank.step(engine, post, {**pieces, **copies, **tangents}, meter.hold)
        outputs = rank.ends(stages, "output")
        meter.hold("outputs", outputs)
        taken = Owned(list(pieces.values()))
        gradients = [taken.take(value) for value in rank.ends(stages, "gradient")]
    meter.hold("gradients", gradients)
    return meter.result()


def _with_state(trained: list[Tensor], make: MakeOptimizer | None) -> torch.optim.Optimizer | None:
    if make is None or not trained:
        return None
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = make(trained)
    optimizer.step()
    for parameter in trained:
        parameter.grad = None
    return optimizer


@dataclass
class _Rank:
    """One rank of a pipeline without processes: what it holds, and its step."""

    local: LocalProgram
    staged: StagedProgram
    schedule: Schedule
    place: int
    mine: Sequence[int] = field(init=False)

    def __post_init__(self) -> None:
        self.mine = self.schedule.stages_of(self.place)

    @staticmethod
    def of(program: Program, plan: Plan, coordinate: Coordinate | None, place: int) -> _Rank:
        if plan.pipeline is None:
            raise PlanError("the plan has neither micro-batches nor stages; live_bytes predicts its lowered program")
        trained = any(role.kind == "tangent" for role in program.inputs)
        schedule = schedule_of(plan.pipeline, forward_only=not trained)
        first = (0,) * plan.mesh.num_axes
        local, staged = stage_pieces(program, plan, first if coordinate is None else coordinate, run=False)
        return _Rank(local, staged, schedule, place)

    def local_value(self, name: str) -> Tensor:
        node = next(n for n in self.local.joint.graph.nodes if n.op == "placeholder" and n.name == name)
        value: Tensor = node.meta["val"]
        return value

    def roles(self) -> list[Input]:
        """Return the inputs that this rank holds."""
        names = {name for stage in self.mine for name in self.staged.stages[stage].placeholders}
        return [r for r in self.local.inputs if r.node in names and r.kind != "tangent" and r.name != INDEX]

    def tangents(self) -> dict[str, Tensor]:
        return {role.node: self.local_value(role.node) for role in self.local.inputs if role.kind == "tangent"}

    def step(self, engine: Engine, post: _NoPost, values: Mapping[str, Value], mark: Mark) -> dict[int, Stage]:
        """Run a step; return the stages with what they hold at its end."""
        stages = {}
        for index in self.mine:
            names = (*self.staged.stages[index].placeholders, *self.tangents())
            own_values = {name: values[name] for name in names if name in values}
            stages[index] = Stage(self.staged, index, engine, own_values)
        gradients = "at once" if self.tangents() else "none"
        order = step_order(self.staged, self.schedule, self.place, gradients=gradients)
        for step in (*order.forward, *order.backward):
            take_step(step, stages, post)
            stage = stages[step.stage]
            if step.kind == RUN and step.when == FORWARD:
                mark("saved", list(stage.loops[step.micro_batch].values()))
            if step.kind == RUN and step.when == BACKWARD:
                mark("gradients", list(stage.sums.values()))
        return stages

    def ends(self, stages: Mapping[int, Stage], kind: str) -> list[Value]:
        """Return the outputs or gradients that this rank has."""
        out = []
        nodes: Any = self.local.joint.graph.output_node().args[0]
        for role, stage, node in zip(self.staged.outputs, self.staged.output_stage, nodes):
            if role.kind == kind and stage is not None and stage in stages and isinstance(node, fx.Node):
                out.append(stages[stage].value(node.name))
        return out


@dataclass
class _NoPost:
    """Messages from nowhere: what a neighbour would send is new; what is sent away is let go."""

    rank: _Rank
    make: Callable[[Tensor], Value]
    kept: dict[tuple[int, str, int, str], list[Value]] = field(default_factory=dict)

    def send(self, step: Step, values: list[Value]) -> None:
        """Keep a message for a stage of this rank; forget any other."""
        to = step.stage + (1 if step.direction == DOWN else -1)
        if to in self.rank.mine:
            self.kept[to, step.when, step.micro_batch, step.direction] = values

    def receive(self, step: Step, names: Sequence[str]) -> list[Value]:
        """Return a message."""
        key = step.stage, step.when, step.micro_batch, step.direction
        if key in self.kept:
            return self.kept.pop(key)
        return [self.make(self.rank.staged.travelling[name]) for name in names]


class _FormEngine:
    """Walks segments."""

    def __init__(self, walk: GraphWalk, staged: StagedProgram) -> None:
        self._walk, self._staged = walk, staged
        self._numbers = [
            walk.fresh(torch.empty((), dtype=torch.int64, device="meta"), "", "buffers")
            for _ in range(staged.num_micro_batches)
        ]

    def run(self, stage: int, when: str, arguments: list[Value]) -> list[Value]:
        """Walk a segment."""
        return self._walk.run(self._staged.stages[stage].segments[when].graph_module, arguments)

    def reduce(self, op: str, one: Value, other: Value) -> Value:
        """Return a new tensor, in memory as the two lie."""
        return self._walk.new(torch.add(one.meta(), other.meta()), "a total")

    def join(self, parts: list[Value], dim: int) -> Value:
        """Return a new tensor of all parts."""
        return self._walk.fresh(torch.cat([part.meta() for part in parts], dim), "a total")

    def number(self, micro_batch: int) -> Form:
        """Return the number of a micro-batch."""
        return self._numbers[micro_batch]

    def enter_forward(self, stage: int) -> None:
        """Do nothing: nothing is drawn."""


class _LoneEngine:
    """Runs segments without the other ranks."""

    def __init__(self, staged: StagedProgram) -> None:
        self._modules = {
            (pieces.index, when): stand_alone(segment.graph_module)
            for pieces in staged.stages
            for when, segment in pieces.segments.items()
        }
        self._numbers = [torch.tensor(number) for number in range(staged.num_micro_batches)]

    def constants(self) -> list[Tensor]:
        """Return the tensors that the segments and the micro-batches' numbers lie in."""
        out = list(self._numbers)
        for module in self._modules.values():
            found = [getattr(module, str(node.target)) for node in module.graph.nodes if node.op == "get_attr"]
            out += [value for value in found if isinstance(value, Tensor)]
        return out

    def run(self, stage: int, when: str, arguments: list[Value]) -> list[Value]:
        """Run a segment; the list is emptied."""
        return list(self._modules[stage, when](arguments))

    def reduce(self, op: str, one: Value, other: Value) -> Value:
        """Return the sum, maximum, ..."""
        return reduce_pair(op, one, other)

    def join(self, parts: list[Value], dim: int) -> Value:
        """Return tensors side by side."""
        return torch.cat(parts, dim)

    def number(self, micro_batch: int) -> Value:
        """Return the number of a micro-batch."""
        return self._numbers[micro_batch]

    def enter_forward(self, stage: int) -> None:
        """Do nothing: the numbers that are drawn do not matter."""
