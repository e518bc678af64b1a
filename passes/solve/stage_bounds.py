"""A fast placement of stages and a fast bound: the busiest rank, made as small as any contiguous cut can make it.

Both come from one dynamic program over cuts. A stage's time is that of the fastest mix of variants that fits its rank:
a multiple-choice knapsack, whose fractional answer (a greedy walk along the convex hull of time and bytes) is a bound
and whose rounded answer is a mix that fits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ..schedules import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    SPLITS_BACKWARD,
    Schedule,
    StageCost,
    fullest_moments,
    in_flight,
    peak_bytes,
    simulate_schedule,
)
from .layout_graph import Floats, Ints
from .stage_records import Region, Variant, stage_costs

Counts = tuple[int, ...]
"""How many regions of each class there are."""


@dataclass(frozen=True)
class Weights:
    """How often each of a stage's seconds counts."""

    forward: float
    input: float
    weight: float
    step: float = 1.0

    def seconds(self, variant: Variant) -> float:
        """Return the weighed seconds of a variant."""
        work = self.forward * variant.forward_s + self.input * variant.input_s + self.weight * variant.weight_s
        return work + self.step * variant.step_s


@dataclass(frozen=True)
class Mix:
    """How some regions run: seconds of a step at least and really, and how many of a class take a variant."""

    least_s: float
    seconds: float
    taken: dict[tuple[int, int], int]


@dataclass(eq=False)
class Bounds:
    """Bounds and first placements of one model under one schedule.

    Args:
        regions: in model order.
        schedule: the table.
        budget: bytes of a rank, or None.
        pinned: regions that begin a stage.
    """

    regions: Sequence[Region]
    schedule: Schedule
    budget: int | None = None
    pinned: Sequence[int] = ()
    mixes: dict[tuple[Counts, Weights, int, float], Mix] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known: dict[tuple[Variant, ...], int] = {}
        self.classes = [known.setdefault(region.variants, len(known)) for region in self.regions]
        self.variants = list(known)
        one_hot = np.eye(len(known), dtype=np.int64)[self.classes]
        prefix = np.concatenate([np.zeros((1, len(known)), dtype=np.int64), np.cumsum(one_hot, axis=0)])
        self.between: Ints = prefix[None, :, :] - prefix[:, None, :]
        self.flight = in_flight(self.schedule)
        size = len(self.regions)
        ends, firsts = np.meshgrid(np.arange(size + 1), np.arange(size + 1))
        self.legal = ends > firsts
        for mark in self.pinned:
            self.legal &= ~((firsts < mark) & (mark < ends))
        flat = self.between.reshape(-1, len(known))
        self.kinds, self.kind_of = np.unique(flat, axis=0, return_inverse=True)

    def mix(self, counts: Counts, weights: Weights, flight: int, budget: float) -> Mix:
        """Return the fastest mix of variants that fits ``budget`` with ``flight`` micro-batches kept."""
        key = (counts, weights, flight, budget)
        if key not in self.mixes:
            self.mixes[key] = self._mix(*key)
        return self.mixes[key]

    def _mix(self, counts: Counts, weights: Weights, flight: int, budget: float) -> Mix:
        steps: list[tuple[float, int, int, int, float, int]] = []
        seconds, used = 0.0, 0
        taken: dict[tuple[int, int], int] = {}
        for number, count in enumerate(counts):
            hull = _hull(self.variants[number], weights, flight)
            seconds += count * hull[0][0]
            used += count * hull[0][1]
            taken[number, hull[0][2]] = count
            for before, after in pairwise(hull):
                slower, saved = after[0] - before[0], before[1] - after[1]
                steps.append((slower / saved, number, before[2], after[2], slower, saved))
        least = seconds
        for _, number, faster, smaller, slower, saved in sorted(steps):
            if used + self._working(taken) <= budget:
                break
            count = taken[number, faster]
            least += max(0.0, min(count, (used - budget) / saved)) * slower
            over = used + self._working({**taken, (number, smaller): 1}) - budget
            moved = min(count, max(1, math.ceil(over / saved)))
            taken[number, faster] = count - moved
            taken[number, smaller] = taken.get((number, smaller), 0) + moved
            seconds += moved * slower
            used -= moved * saved
        if used + self._working(taken) > budget:
            seconds = math.inf
        return Mix(math.inf if used > budget else least, seconds, taken)

    def _working(self, taken: dict[tuple[int, int], int]) -> int:
        return max((self.variants[c][v].working_bytes for (c, v), count in taken.items() if count), default=0)

    def bound_s(self) -> float:
        """Return a lower bound on the makespan of any placement; infinite when none fits the budget."""
        schedule, num = self.schedule, self.schedule.num_ranks
        total = tuple(self.between[0, -1].tolist())
        whole = self.mix(total, self._all(), self._least_flight(), self._budget(num))
        ways = sum(range(num)) * min(v.forward_s + v.input_s for region in self.regions for v in region.variants)
        homes = all(row[-1].kind in (BACKWARD, BACKWARD_INPUT) for row in schedule.actions)
        share = (whole.least_s + (ways if homes else 0.0)) / num
        if schedule.num_stages == len(self.regions):
            share = max(share, simulate_schedule(schedule, [_least_cost(region) for region in self.regions]).makespan_s)
        if schedule.chunks > 1:
            return share
        through = [table + self._ways(stage)[:, None] for stage, table in enumerate(self._times(1.0, self._alls()))]
        turned = [
            table + self._turn(stage)[:, None] for stage, table in enumerate(self._times(1.0, self._after_turns()))
        ]
        return max(share, self._cut(through)[0], self._cut(turned)[0])

    def _budget(self, share: float) -> float:
        return math.inf if self.budget is None else self.budget * share

    def _all(self) -> Weights:
        number = self.schedule.num_micro_batches
        return Weights(number, number, number)

    def _alls(self) -> list[Weights]:
        return [self._all()] * self.schedule.num_stages

    def _least_flight(self) -> int:
        """Return a number of micro-batches that every stage keeps at one moment of its rank."""
        return min(
            max(min(count for _, count in moment) for moment in moments) for moments in fullest_moments(self.schedule)
        )

    def _times(self, share: float, weights: Sequence[Weights], *, least: bool = True) -> list[Floats]:
        """Return for every stage the weighed seconds of every range ``[first, end)`` of regions.

        Args:
            share: the part of a rank's budget that the stage may take.
            weights: of every stage.
            least: count fractional mixes, a bound; else mixes that fit.
        """
        tables: dict[tuple[int, Weights], Floats] = {}
        for key in zip(self.flight, weights, strict=True):
            if key in tables:
                continue
            seconds = []
            for kind in self.kinds.tolist():
                found = (
                    self.mix(tuple(kind), key[1], key[0], self._budget(share)) if min(kind) >= 0 < max(kind) else None
                )
                seconds.append(math.inf if found is None else found.least_s if least else found.seconds)
            table = np.array(seconds)[self.kind_of.ravel()].reshape(self.legal.shape)
            tables[key] = np.where(self.legal, table, np.inf)
        return [tables[key] for key in zip(self.flight, weights, strict=True)]

    def _least_sums(self, weights: Weights) -> Floats:
        """Return the least weighed seconds of all regions before each."""
        each = [min(weights.seconds(variant) for variant in region.variants) for region in self.regions]
        return np.concatenate([[0.0], np.cumsum(each)])

    def _send_s(self) -> float:
        return min((region.send_s for region in self.regions[:-1]), default=0.0)

    def _home(self, rank: int) -> Weights:
        """Return what counts on the way of a rank's last gradient to the first stage: nothing if it sends none."""
        last = self.schedule.actions[rank][-1].kind
        if last not in (BACKWARD, BACKWARD_INPUT):
            return Weights(0.0, 0.0, 0.0, 0.0)
        return Weights(0.0, 1.0, 1.0 if last == BACKWARD else 0.0, 0.0)

    def _ways(self, stage: int) -> Floats:
        """Return for every first region the least seconds of the way to its stage and of the last gradient's back."""
        home = self._home(self.schedule.rank_of(stage))
        sends = stage * (2.0 if home.input else 1.0) * self._send_s()
        return self._least_sums(Weights(1.0, 0.0, 0.0, 0.0)) + self._least_sums(home) + sends

    def _after_turns(self) -> list[Weights]:
        """Return for every stage (the only one of its rank) what its rank does after its first backward.

        GPipe's first backward waits besides for the last forward, which follows the first one by the slowest stage.
        """
        out = []
        for row in self.schedule.actions:
            turn = next(at for at, action in enumerate(row) if action.kind in (BACKWARD, BACKWARD_INPUT))
            after = Counter(action.kind for action in row[turn + 1 :])
            forwards = after[FORWARD] + (self.schedule.num_micro_batches - 1 if self.schedule.name == "gpipe" else 0)
            weights = (forwards, after[BACKWARD] + after[BACKWARD_INPUT], after[BACKWARD] + after[BACKWARD_WEIGHT])
            out.append(Weights(*map(float, weights)))
        return out

    def _turn(self, stage: int) -> Floats:
        """Return for every first region the least seconds of the first micro-batch's way to the end and back to it."""
        home = self._home(self.schedule.rank_of(stage))
        back = Weights(0.0, 1.0, 1.0 if self.schedule.name not in SPLITS_BACKWARD else 0.0, 0.0)
        forward, backward = self._least_sums(Weights(1.0, 0.0, 0.0, 0.0)), self._least_sums(back)
        last = self.schedule.num_stages - 1
        sends = last + (last - stage) + (stage if home.input else 0)
        ways: Floats = forward[-1] + (backward[-1] - backward) + self._least_sums(home) + sends * self._send_s()
        return ways

    def _cut(self, times: list[Floats]) -> tuple[float, tuple[int, ...]]:
        """Return the smallest time of the slowest stage, and where its stages begin."""
        reach = np.full(len(self.regions) + 1, np.inf)
        reach[0] = 0.0
        chosen: list[Ints] = []
        for table in times:
            worst = np.maximum(reach[:, None], table)
            chosen.append(np.argmin(worst, axis=0))
            reach = worst[chosen[-1], np.arange(len(reach))]
        firsts, end = [], len(self.regions)
        for came in reversed(chosen):
            end = int(came[end])
            firsts.append(end)
        return float(reach[-1]), tuple(reversed(firsts))

    def placements(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return first regions and variants of good placements that fit; none when none was found."""
        turned = self._after_turns() if self.schedule.chunks == 1 else self._alls()
        found = [self._placement(weights) for weights in dict.fromkeys((tuple(self._alls()), tuple(turned)))]
        return [one for one in dict.fromkeys(found) if one is not None]

    def _placement(self, weights: Sequence[Weights]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        share = self._share()
        for _ in range(8):
            time, firsts = self._cut(self._times(share, weights, least=False))
            if math.isinf(time):
                return None
            variants = self._assign(firsts, weights, share)
            fullest = max(peak_bytes(self.schedule, stage_costs(self.regions, firsts, variants)))
            if self.budget is None or fullest <= self.budget:
                return firsts, variants
            share *= 0.99 * self.budget / fullest
        return None

    def _share(self) -> float:
        """Return the part of a rank's budget for a stage: its part of what the rank keeps at its fullest moment."""
        if self.schedule.chunks == 1:
            return 1.0
        return max(
            sum(self.flight[stage] for stage, _ in moment) / max(1, sum(count for _, count in moment))
            for moments in fullest_moments(self.schedule)
            for moment in moments
        ) / self.schedule.chunks  # fmt: skip

    def _assign(self, firsts: Sequence[int], weights: Sequence[Weights], share: float) -> tuple[int, ...]:
        out: list[int] = []
        for stage, (first, end) in enumerate(zip(firsts, [*firsts[1:], len(self.regions)], strict=True)):
            counts = tuple(self.between[first, end].tolist())
            left = dict(self.mix(counts, weights[stage], self.flight[stage], self._budget(share)).taken)
            for number in self.classes[first:end]:
                variant = next(v for (c, v), count in sorted(left.items()) if c == number and count)
                left[number, variant] -= 1
                out.append(variant)
        return tuple(out)


def _least_cost(region: Region) -> StageCost:
    """Return the least of each cost of a region, as if one variant had them all."""
    least = {
        field: min(getattr(variant, field) for variant in region.variants)
        for field in ("forward_s", "input_s", "weight_s", "step_s")
    }
    return StageCost(send_s=region.send_s, **least)


def _hull(variants: Sequence[Variant], weights: Weights, flight: int) -> list[tuple[float, int, int]]:
    """Return ``(weighed seconds, bytes, index)`` of the variants on the lower hull, the fastest first."""
    points = sorted(
        (weights.seconds(variant), variant.state_bytes + flight * variant.saved_bytes, index)
        for index, variant in enumerate(variants)
    )
    out: list[tuple[float, int, int]] = []
    for point in points:
        if out and point[1] >= out[-1][1]:
            continue
        while len(out) > 1 and (point[0] - out[-1][0]) * (out[-2][1] - out[-1][1]) <= (out[-1][0] - out[-2][0]) * (
            out[-1][1] - point[1]
        ):
            out.pop()
        out.append(point)
    return out
