"""Stages on real processes: segments as generated code, messages by point-to-point sends along the pipeline axis."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from autopar.errors import LoweringError
from autopar.passes.schedules import Schedule
from autopar.passes.stage_pieces import StagedProgram
from autopar.runtime.compile_segments import compile_segments
from autopar.runtime.groups import bind_groups
from autopar.runtime.pipeline_steps import DOWN, SEND, Step, StepOrder
from autopar.runtime.randomness import set_generator_state
from autopar.runtime.stage_groups import StageGroups
from autopar.runtime.sum_on_boards import SmallSum, fits

_IN_PLACE: dict[str, Any] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


class ProcessEngine:
    """Runs this rank's segments on its tensors.

    Args:
        staged: the program.
        stages: the stages of this rank.
        groups: the processes.
        compiled: what segments compute between collectives is compiled.
        parts: the segments that it will be asked for; None for all.
    """

    def __init__(
        self,
        staged: StagedProgram,
        stages: Sequence[int],
        groups: StageGroups,
        *,
        compiled: bool = False,
        parts: Collection[str] | None = None,
    ) -> None:
        here = groups.stage
        self._device = here.device
        self._modules: dict[tuple[int, str], fx.GraphModule] = {}
        for stage in stages:
            for when, segment in staged.stages[stage].segments.items():
                if parts is not None and when not in parts:
                    continue
                module = bind_groups(
                    segment.graph_module, here.names, here.device, boards=here.boards, eager=not compiled
                )
                self._modules[stage, when] = compile_segments(module) if compiled else module
        self._numbers = [torch.tensor(number) for number in range(staged.num_micro_batches)]
        self.starts: dict[int, Tensor] = {}

    def run(self, stage: int, when: str, arguments: list[Any]) -> list[Any]:
        """Run a segment; the list is emptied."""
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            return list(self._modules[stage, when](arguments))

    def reduce(self, op: str, one: Tensor, other: Tensor) -> Tensor:
        """Return the sum, maximum, ... of two tensors."""
        result: Tensor = _IN_PLACE[op](one, other)
        return result

    def join(self, parts: list[Tensor], dim: int) -> Tensor:
        """Return tensors side by side."""
        return torch.cat(parts, dim)

    def number(self, micro_batch: int) -> Tensor:
        """Return the number of a micro-batch, on the CPU."""
        return self._numbers[micro_batch]

    def enter_forward(self, stage: int) -> None:
        """Set the generator to where the numbers of a stage's forward start."""
        if stage in self.starts:
            set_generator_state(self._device, self.starts[stage])


@dataclass
class Mail:
    """The messages of one call of one rank.

    Receives are posted in the order in which the sender's own table sends, whatever the order in which they are wanted:
    messages between two ranks carry no tags.

    Args:
        staged: the program.
        schedule: says which rank holds a stage.
        groups: the processes.
        orders: what every rank of the pipeline axis does, from which follows what comes from whom.
    """

    staged: StagedProgram
    schedule: Schedule
    groups: StageGroups
    orders: Sequence[StepOrder]
    _incoming: dict[int, list[Step]] = field(init=False)
    _posted: dict[tuple[int, str, int, str], tuple[list[Tensor], list[Any]]] = field(init=False, default_factory=dict)
    _kept: dict[tuple[int, str, int, str], list[Tensor]] = field(init=False, default_factory=dict)
    _sent: list[tuple[Any, Tensor]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._incoming = {place: [] for place in range(self.groups.num_places)}
        for place, order in enumerate(self.orders):
            for step in (*order.forward, *order.backward):
                if step.kind == SEND and self.schedule.rank_of(_reader(step)) == self.groups.place:
                    self._incoming[place].append(step)

    def send(self, step: Step, values: list[Tensor]) -> None:
        """Start to send a message; tensors are held until it is gone."""
        place = self.schedule.rank_of(_reader(step))
        if place == self.groups.place:
            self._kept[_key(step)] = values
            return
        self._sent = [(work, tensor) for work, tensor in self._sent if not work.is_completed()]
        for value in values:
            if value.numel():
                tensor = _carried(value.contiguous())
                work = dist.isend(tensor, self.groups.global_rank(place), group=self.groups.line)
                self._sent.append((work, tensor))

    def receive(self, step: Step, names: Sequence[str]) -> list[Tensor]:
        """Wait for what the neighbour sends for a step."""
        key = step.stage, step.when, step.micro_batch, step.direction
        if key in self._kept:
            return self._kept.pop(key)
        place = self.schedule.rank_of(step.stage - 1 if step.direction == DOWN else step.stage + 1)
        while key not in self._posted:
            if not self._incoming[place]:
                raise LoweringError(f"nobody sends what stage {step.stage} waits for: {step}")
            self._post(place, self._incoming[place].pop(0))
        tensors, works = self._posted.pop(key)
        for work in works:
            work.wait()
        return tensors

    def _post(self, place: int, step: Step) -> None:
        sent = self.staged.sent_down if step.direction == DOWN else self.staged.sent_up
        tensors, works = [], []
        for name in sent(step.stage, step.when):
            like = self.staged.travelling[name]
            tensor = torch.empty(like.shape, dtype=like.dtype, device=self.groups.stage.device)
            if tensor.numel():
                works.append(dist.irecv(_carried(tensor), self.groups.global_rank(place), group=self.groups.line))
            tensors.append(tensor)
        self._posted[_key(step)] = tensors, works

    def close(self) -> None:
        """Wait until everything that was sent is gone."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


def _reader(step: Step) -> int:
    return step.stage + 1 if step.direction == DOWN else step.stage - 1


def _key(step: Step) -> tuple[int, str, int, str]:
    return _reader(step), step.when, step.micro_batch, step.direction


def _carried(tensor: Tensor) -> Tensor:
    """Return a tensor as backends carry it: truth values as bytes, in the same memory."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def spread(tensor: Tensor, place: int, groups: StageGroups) -> Tensor:
    """Return the tensor that the rank at ``place`` of the line hands in, on every rank of the line. Collective."""
    if groups.line is None or groups.num_places == 1:
        return tensor
    if groups.line_board is not None and fits(tensor):
        small = SmallSum(groups.line_board, 0, tensor)
        return small.total(small.post(tensor), [place])
    held = tensor.contiguous()
    dist.broadcast(_carried(held.reshape(-1)), groups.global_rank(place), group=groups.line)
    return held


def owners(staged: StagedProgram, schedule: Schedule) -> Mapping[str, int]:
    """Return the full name of every parameter -> the place on the pipeline axis that keeps it."""
    names = {role.node: role.name for role in staged.inputs if role.kind == "parameter"}
    return {
        names[node]: schedule.rank_of(pieces.index) for pieces in staged.stages for node in pieces.owns if node in names
    }
