"""Pipeline schedules: their tables, those of ``torch.distributed.pipelining``, and a simulator of time and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from autopar.errors import AutoparError, OptionError

from .torch_private import pipeline_order

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"

SCHEDULES: tuple[str, ...] = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv")
"""Names of the schedules."""

NAMES: dict[str, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "interleaved 1F1B",
    "zero_bubble": "zero bubble",
    "zbv": "zero bubble (V)",
}
"""What people call them."""

SINGLE = ("gpipe", "1f1b")
"""Schedules with one stage a rank."""

SPLITS_BACKWARD = ("zero_bubble", "zbv")
"""Schedules whose backward comes in two parts: for the inputs, then for the weights."""


@dataclass(frozen=True, order=True)
class Action:
    """One piece of work: of a stage, on a micro-batch.

    ``kind`` is ``F`` (forward), ``B`` (the whole backward), ``I`` (its part for the inputs) or ``W`` (for the weights).
    """

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True, eq=False)
class Schedule:
    """A table: what every rank of the pipeline axis does, in order.

    Attributes:
        name: one of ``SCHEDULES``.
        num_ranks: of the pipeline axis.
        num_stages: a multiple of it.
        num_micro_batches: of a step.
        actions: a tuple a rank.
    """

    name: str
    num_ranks: int
    num_stages: int
    num_micro_batches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def _key(self) -> tuple[str, int, int, int, int]:
        return self.name, self.num_ranks, self.num_stages, self.num_micro_batches, len(self.actions[0])

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Schedule) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def chunks(self) -> int:
        """Stages of each rank."""
        return self.num_stages // self.num_ranks

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage: round and round, or down and up again for ``zbv``."""
        return stage_rank(self.name, self.num_ranks, stage)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, in model order."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)

    def __str__(self) -> str:
        return "\n".join(f"{rank}: {' '.join(map(str, row))}" for rank, row in enumerate(self.actions))


def stage_rank(name: str, num_ranks: int, stage: int) -> int:
    """Return the rank that holds ``stage`` under the schedule called ``name``."""
    turn, rank = divmod(stage, num_ranks)
    return num_ranks - 1 - rank if name == "zbv" and turn % 2 else rank


@lru_cache(maxsize=256)
def make_schedule(
    name: str, num_ranks: int, num_micro_batches: int, chunks: int = 1, *, forward_only: bool = False
) -> Schedule:
    """Return the table of a schedule. Fewer micro-batches than stages are allowed: the bubble is then large.

    Torch's tables need micro-batches that fill the pipeline or come in equal rounds. For other numbers the table of
    the next one that it supports is made, and the micro-batches that do not exist are taken out: what is left depends
    on nothing that is gone.

    Args:
        name: one of ``SCHEDULES``.
        num_ranks: of the pipeline axis.
        num_micro_batches: of a step.
        chunks: stages a rank: 1 for GPipe and 1F1B, 2 for ``zbv``.
        forward_only: leave the backward out.

    Raises:
        OptionError: an unknown name, or a number that the schedule can't have.

    >>> print(make_schedule("1f1b", 2, 3))
    0: 0F0 0F1 0B0 0F2 0B1 0B2
    1: 1F0 1B0 1F1 1B1 1F2 1B2
    """
    if name not in SCHEDULES:
        raise OptionError(f"no schedule is called {name!r}; use one of {', '.join(map(repr, SCHEDULES))}")
    for what, value in (("stages", num_ranks), ("micro-batches", num_micro_batches), ("stages a rank", chunks)):
        if value < 1:
            raise OptionError(f"a schedule has at least one of its {what}; got {value}")
    if name in SINGLE and chunks != 1:
        raise OptionError(f"{NAMES[name]} has one stage a rank; got {chunks}: use 'interleaved_1f1b' for more")
    if name == "zbv" and chunks != 2:
        raise OptionError(f"{NAMES[name]} has exactly two stages a rank; got {chunks}")
    made = _supported(name, num_ranks, num_micro_batches)
    rows = tuple(
        tuple(
            Action(*step) for step in row if step[2] < num_micro_batches and not (forward_only and step[1] != FORWARD)
        )
        for row in pipeline_order(name, num_ranks, chunks, made)
    )
    schedule = Schedule(name, num_ranks, num_ranks * chunks, num_micro_batches, rows)
    _check_table(schedule, forward_only)
    return schedule


def _check_table(schedule: Schedule, forward_only: bool) -> None:
    """Assert that every stage does each part of every micro-batch once, on its own rank."""
    parts = (BACKWARD_INPUT, BACKWARD_WEIGHT) if schedule.name in SPLITS_BACKWARD else (BACKWARD,)
    kinds = (FORWARD,) if forward_only else (FORWARD, *parts)
    for rank, row in enumerate(schedule.actions):
        wanted = {
            Action(stage, kind, micro_batch)
            for stage in schedule.stages_of(rank)
            for kind in kinds
            for micro_batch in range(schedule.num_micro_batches)
        }
        if len(row) != len(wanted) or set(row) != wanted:
            raise AutoparError(f"the table of {schedule.name} of this torch release is not complete:\n{schedule}")


def _supported(name: str, num_ranks: int, num_micro_batches: int) -> int:
    """Return the least number of micro-batches, at least that asked for, for which torch has a table."""
    number = num_micro_batches
    if name == "1f1b":
        number = max(number, num_ranks)
    if name in ("interleaved_1f1b", "zero_bubble"):
        while number % max(1, number // num_ranks):
            number += 1
    return number


@dataclass(frozen=True)
class StageCost:
    """What one stage costs on one rank.

    Attributes:
        forward_s, input_s, weight_s: seconds of one micro-batch: forward, backward for inputs, backward for weights.
        send_s: seconds until what it hands to the next stage is there; the gradient takes as long on its way back.
        saved_bytes: kept from a micro-batch's forward to the end of its backward.
        state_bytes: parameters, gradients and optimizer state.
        working_bytes: needed besides while the stage works on one micro-batch, such as what it computes again.
        step_s: seconds once a step after the last backward: gradients reduced, parameters updated.
    """

    forward_s: float
    input_s: float
    weight_s: float = 0.0
    send_s: float = 0.0
    saved_bytes: int = 0
    state_bytes: int = 0
    working_bytes: int = 0
    step_s: float = 0.0

    @property
    def micro_batch_s(self) -> float:
        """Seconds of work for a micro-batch."""
        return self.forward_s + self.input_s + self.weight_s

    def seconds(self, kind: str) -> float:
        """Return the seconds of an action of a kind."""
        if kind == FORWARD:
            return self.forward_s
        if kind == BACKWARD:
            return self.input_s + self.weight_s
        return self.input_s if kind == BACKWARD_INPUT else self.weight_s


Term = tuple[int, Literal["forward", "input", "weight", "send", "step"]]
"""A stage and one of its costs in seconds."""


@dataclass(frozen=True)
class Simulation:
    """What a schedule takes with given stages.

    Attributes:
        makespan_s: seconds of a step.
        busy_s: of each rank.
        peak_bytes: of each rank, as ``peak_bytes`` counts.
        in_flight: of each stage: most micro-batches whose forward is done and whose backward is not.
        path: how often each cost lies on a longest path: ``makespan_s`` is their sum, and with any other costs the
            same sum is a lower bound.
    """

    makespan_s: float
    busy_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    in_flight: tuple[int, ...]
    path: Mapping[Term, int]

    @property
    def bubble_share(self) -> float:
        """The part of the step in which the busiest rank waits."""
        return 1.0 - max(self.busy_s) / self.makespan_s if self.makespan_s else 0.0


def simulate_schedule(schedule: Schedule, costs: Sequence[StageCost]) -> Simulation:
    """Return the makespan and memory of a schedule. Sending overlaps with compute; a rank does one action at a time.

    Raises:
        OptionError: not one cost a stage.
    """
    if len(costs) != schedule.num_stages:
        raise OptionError(f"a schedule of {schedule.num_stages} stages needs as many costs; got {len(costs)}")
    order = _dependencies(schedule)
    seconds = [[cost.seconds(kind) for kind in _KINDS] for cost in costs]
    delays = [cost.send_s for cost in costs]
    ends = [0.0] * len(order)
    for at, (stage, kind, before, source, send) in enumerate(order):
        begin = ends[before] if before >= 0 else 0.0
        if source >= 0:
            begin = max(begin, ends[source] + (delays[send] if send >= 0 else 0.0))
        ends[at] = begin + seconds[stage][kind]
    steps = [sum(costs[stage].step_s for stage in schedule.stages_of(rank)) for rank in range(schedule.num_ranks)]
    lasts = _lasts(schedule)
    finish, rank = max((ends[last] + step, -rank) for rank, (last, step) in enumerate(zip(lasts, steps, strict=True)))
    path: dict[Term, int] = {(stage, "step"): 1 for stage in schedule.stages_of(-rank)}
    _trace(order, ends, delays, lasts[-rank], path)
    busy = tuple(
        math.fsum(costs[action.stage].seconds(action.kind) for action in row) + step
        for row, step in zip(schedule.actions, steps, strict=True)
    )
    return Simulation(finish, busy, peak_bytes(schedule, costs), in_flight(schedule), path)


def peak_bytes(schedule: Schedule, costs: Sequence[StageCost]) -> tuple[int, ...]:
    """Return the bytes of each rank at its fullest moment: state, what is saved, and one stage at work."""
    out = []
    for rank, moments in enumerate(fullest_moments(schedule)):
        stages = schedule.stages_of(rank)
        saved = max(sum(count * costs[stage].saved_bytes for stage, count in moment) for moment in moments)
        state = sum(costs[stage].state_bytes for stage in stages)
        out.append(state + saved + max(costs[stage].working_bytes for stage in stages))
    return tuple(out)


_KINDS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
_TERMS: tuple[tuple[Literal["forward", "input", "weight"], ...], ...] = (
    ("forward",), ("input", "weight"), ("input",), ("weight",),
)  # fmt: skip

Step = tuple[int, int, int, int, int]
"""Of an action: its stage, the index of its kind, of the action before it on its rank and of the one whose result it
needs (-1 for none), and the stage behind which that result travels (-1 when it stays on its rank)."""


@lru_cache(maxsize=64)
def _dependencies(schedule: Schedule) -> tuple[Step, ...]:
    """Return all actions in an order in which everything that an action waits for comes before it."""
    known: dict[Action, int] = {}
    order: list[Step] = []
    at = [0] * schedule.num_ranks
    waiting = list(range(schedule.num_ranks))
    while waiting:
        stuck = True
        for rank in waiting:
            row = schedule.actions[rank]
            while at[rank] < len(row):
                action = row[at[rank]]
                source = _source(schedule, action)
                if source is not None and source not in known:
                    break
                before = known[row[at[rank] - 1]] if at[rank] else -1
                away = source is not None and schedule.rank_of(source.stage) != rank
                send = min(source.stage, action.stage) if source is not None and away else -1
                known[action] = len(order)
                needs = known[source] if source is not None else -1
                order.append((action.stage, _KINDS.index(action.kind), before, needs, send))
                at[rank] += 1
                stuck = False
        waiting = [rank for rank in waiting if at[rank] < len(schedule.actions[rank])]
        if stuck and waiting:
            raise OptionError(
                f"the table of {schedule.name} never ends: rank {waiting[0]} waits for itself\n{schedule}"
            )
    return tuple(order)


@lru_cache(maxsize=64)
def _lasts(schedule: Schedule) -> tuple[int, ...]:
    """Return the index of the last action of every rank."""
    out = [0] * schedule.num_ranks
    for index, (stage, *_) in enumerate(_dependencies(schedule)):
        out[schedule.rank_of(stage)] = index
    return tuple(out)


def _source(schedule: Schedule, action: Action) -> Action | None:
    """Return the action of another stage that one needs."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind == FORWARD:
        return Action(stage - 1, FORWARD, micro_batch) if stage else None
    if action.kind == BACKWARD_WEIGHT or stage == schedule.num_stages - 1:
        return None
    return Action(stage + 1, BACKWARD_INPUT if schedule.name in SPLITS_BACKWARD else BACKWARD, micro_batch)


def _trace(
    order: Sequence[Step], ends: Sequence[float], delays: Sequence[float], last: int, path: dict[Term, int]
) -> None:
    """Count the costs on the way back from an action to the begin of the step."""
    at = last
    while at >= 0:
        stage, kind, before, source, send = order[at]
        for term in _TERMS[kind]:
            path[stage, term] = path.get((stage, term), 0) + 1
        free = ends[before] if before >= 0 else 0.0
        there = ends[source] + (delays[send] if send >= 0 else 0.0) if source >= 0 else 0.0
        if source >= 0 and there > free:
            if send >= 0:
                path[send, "send"] = path.get((send, "send"), 0) + 1
            at = source
        else:
            at = before


@lru_cache(maxsize=256)
def fullest_moments(schedule: Schedule) -> tuple[tuple[tuple[tuple[int, int], ...], ...], ...]:
    """Return for every rank the moments that can be its fullest: ``(stage, micro-batches in flight)`` of its stages.

    What a stage keeps for a micro-batch is freed by the whole backward, or by its part for the weights. A moment at
    which every stage has no more in flight than at another one is left out.
    """
    out = []
    for rank, row in enumerate(schedule.actions):
        stages = schedule.stages_of(rank)
        now = dict.fromkeys(stages, 0)
        moments: list[tuple[int, ...]] = [(0,) * len(stages)]
        for action in row:
            if action.kind == FORWARD:
                now[action.stage] += 1
                moments.append(tuple(now.values()))
            elif action.kind in (BACKWARD, BACKWARD_WEIGHT):
                now[action.stage] -= 1
        distinct = sorted(set(moments), reverse=True)
        fullest = [
            one
            for one in distinct
            if not any(other != one and all(a >= b for a, b in zip(other, one, strict=True)) for other in distinct)
        ]
        out.append(tuple(tuple(zip(stages, one, strict=True)) for one in fullest))
    return tuple(out)


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return for every stage the most micro-batches that it keeps at one time."""
    most = [0] * schedule.num_stages
    for moments in fullest_moments(schedule):
        for moment in moments:
            for stage, count in moment:
                most[stage] = max(most[stage], count)
    return tuple(most)


def bubble_share(num_stages: int, num_micro_batches: int) -> float:
    """Return the bubble of GPipe and of 1F1B with equal stages: ``(K - 1) / (M + K - 1)`` (GPipe, Huang et al. 2019).

    >>> bubble_share(4, 12)
    0.2
    """
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


def least_makespan(schedule: Schedule, costs: Sequence[StageCost]) -> float:
    """Return a lower bound of the makespan that needs no simulation: the busiest rank, or one micro-batch's way."""
    steps = schedule.num_micro_batches
    busy = [
        sum(steps * costs[stage].micro_batch_s + costs[stage].step_s for stage in schedule.stages_of(rank))
        for rank in range(schedule.num_ranks)
    ]
    return max(max(busy), math.fsum(cost.forward_s + cost.input_s for cost in costs))
