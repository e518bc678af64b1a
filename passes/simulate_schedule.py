"""Simulate a pipeline schedule: its time, its longest paths, its memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from autopar.errors import OptionError

from .schedules import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, SPLITS_BACKWARD, Action, Schedule


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

Path = Mapping[Term, float]
"""How often each cost lies on a path, or on the mean of several."""


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
    ends, finishes = _run(schedule, costs)
    finish, rank = max((finish, -rank) for rank, finish in enumerate(finishes))
    path = _trace(schedule, costs, ends, -rank)
    busy = tuple(
        math.fsum(costs[action.stage].seconds(action.kind) for action in row) + _step_s(schedule, costs, rank)
        for rank, row in enumerate(schedule.actions)
    )
    return Simulation(finish, busy, peak_bytes(schedule, costs), in_flight(schedule), path)


def longest_paths(schedule: Schedule, costs: Sequence[StageCost]) -> tuple[tuple[float, Mapping[Term, int]], ...]:
    """Return the longest path to the end of every rank, the longest of them first: its seconds, and its costs."""
    ends, finishes = _run(schedule, costs)
    ranks = sorted(range(schedule.num_ranks), key=lambda rank: (-finishes[rank], rank))
    return tuple((finishes[rank], _trace(schedule, costs, ends, rank)) for rank in ranks)


def _run(schedule: Schedule, costs: Sequence[StageCost]) -> tuple[list[float], list[float]]:
    """Return when every action ends, in the order of ``dependencies``, and every rank."""
    seconds = [[cost.seconds(kind) for kind in KINDS] for cost in costs]
    delays = [cost.send_s for cost in costs]
    ends: list[float] = []
    for stage, kind, before, source, send in dependencies(schedule):
        begin = ends[before] if before >= 0 else 0.0
        if source >= 0:
            begin = max(begin, ends[source] + (delays[send] if send >= 0 else 0.0))
        ends.append(begin + seconds[stage][kind])
    return ends, [ends[last] + _step_s(schedule, costs, rank) for rank, last in enumerate(last_actions(schedule))]


def _step_s(schedule: Schedule, costs: Sequence[StageCost], rank: int) -> float:
    return sum(costs[stage].step_s for stage in schedule.stages_of(rank))


def peak_bytes(schedule: Schedule, costs: Sequence[StageCost]) -> tuple[int, ...]:
    """Return the bytes of each rank at its fullest moment: state, what is saved, and one stage at work."""
    out = []
    for rank, moments in enumerate(fullest_moments(schedule)):
        stages = schedule.stages_of(rank)
        saved = max(sum(count * costs[stage].saved_bytes for stage, count in moment) for moment in moments)
        state = sum(costs[stage].state_bytes for stage in stages)
        out.append(state + saved + max(costs[stage].working_bytes for stage in stages))
    return tuple(out)


KINDS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
"""Kinds of actions by their index."""

TERMS: tuple[tuple[Literal["forward", "input", "weight"], ...], ...] = (
    ("forward",), ("input", "weight"), ("input",), ("weight",),
)  # fmt: skip
"""The costs of each of ``KINDS``."""

Step = tuple[int, int, int, int, int]
"""Of an action: its stage, the index of its kind, of the action before it on its rank and of the one whose result it
needs (-1 for none), and the stage behind which that result travels (-1 when it stays on its rank)."""


@lru_cache(maxsize=64)
def dependencies(schedule: Schedule) -> tuple[Step, ...]:
    """Return all actions in an order in which everything that an action waits for comes before it."""
    known: dict[tuple[int, str, int], int] = {}
    order: list[Step] = []
    at = [0] * schedule.num_ranks
    rank_of = [schedule.rank_of(stage) for stage in range(schedule.num_stages)]
    handed = BACKWARD_INPUT if schedule.name in SPLITS_BACKWARD else BACKWARD
    last = schedule.num_stages - 1
    waiting = list(range(schedule.num_ranks))
    while waiting:
        stuck = True
        for rank in waiting:
            row = schedule.actions[rank]
            while at[rank] < len(row):
                action = row[at[rank]]
                stage, kind, number = action.stage, action.kind, action.micro_batch
                other, needs, send = -1, -1, -1
                if kind == FORWARD:
                    other = stage - 1
                elif kind != BACKWARD_WEIGHT and stage < last:
                    other = stage + 1
                if other >= 0:
                    needs = known.get((other, FORWARD if kind == FORWARD else handed, number), -1)
                    if needs < 0:
                        break
                    send = min(other, stage) if rank_of[other] != rank else -1
                before = known[_key(row[at[rank] - 1])] if at[rank] else -1
                known[stage, kind, number] = len(order)
                order.append((stage, KINDS.index(kind), before, needs, send))
                at[rank] += 1
                stuck = False
        waiting = [rank for rank in waiting if at[rank] < len(schedule.actions[rank])]
        if stuck and waiting:
            raise OptionError(
                f"the table of {schedule.name} never ends: rank {waiting[0]} waits for itself\n{schedule}"
            )
    return tuple(order)


@lru_cache(maxsize=64)
def last_actions(schedule: Schedule) -> tuple[int, ...]:
    """Return the index of the last action of every rank."""
    out = [0] * schedule.num_ranks
    for index, (stage, *_) in enumerate(dependencies(schedule)):
        out[schedule.rank_of(stage)] = index
    return tuple(out)


def _key(action: Action) -> tuple[int, str, int]:
    return action.stage, action.kind, action.micro_batch


def _trace(schedule: Schedule, costs: Sequence[StageCost], ends: Sequence[float], rank: int) -> dict[Term, int]:
    """Return how often each cost lies on the way from the begin of the step to a rank's end."""
    order = dependencies(schedule)
    path: dict[Term, int] = {(stage, "step"): 1 for stage in schedule.stages_of(rank)}
    at = last_actions(schedule)[rank]
    while at >= 0:
        stage, kind, before, source, send = order[at]
        for term in TERMS[kind]:
            path[stage, term] = path.get((stage, term), 0) + 1
        free = ends[before] if before >= 0 else 0.0
        there = ends[source] + (costs[send].send_s if send >= 0 else 0.0) if source >= 0 else 0.0
        if source >= 0 and there > free:
            if send >= 0:
                path[send, "send"] = path.get((send, "send"), 0) + 1
            at = source
        else:
            at = before
    return path


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
