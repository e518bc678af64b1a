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

from ..schedules import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, SPLITS_BACKWARD, Schedule
from ..simulate_schedule import StageCost, fullest_moments, in_flight, peak_bytes, simulate_schedule
from .layout_graph import Floats, Ints
from .stage_records import Region, Variant, stage_costs


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


@dataclass(frozen=True, eq=False)
class Mixes:
    """How the regions of ranges run: weighed seconds at least and really, and how many of a class take a variant.

    ``taken`` is ``[range, class, variant]``.
    """

    least_s: Floats
    seconds: Floats
    taken: Ints


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
    mixes: dict[tuple[Weights, int, float], Mixes] = field(default_factory=dict)
    found_s: float | None = None

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
        kinds, self.kind_of = np.unique(flat, axis=0, return_inverse=True)
        self.kinds: Ints = np.maximum(kinds, 0)

    def _mixes(self, weights: Weights, flight: int, budget: float) -> Mixes:
        """Return for every kind of range the fastest mix of variants that fits ``budget``."""
        key = (weights, flight, budget)
        if key not in self.mixes:
            self.mixes[key] = self._mix(self.kinds, *key)
        return self.mixes[key]

    def _mix(self, counts: Ints, weights: Weights, flight: int, budget: float) -> Mixes:
        """Return the mixes of ranges that hold ``counts[range, class]`` regions and keep ``flight`` micro-batches."""
        width = max(len(variants) for variants in self.variants)
        working = np.zeros((len(self.variants), width), dtype=np.int64)
        taken = np.zeros((len(counts), len(self.variants), width), dtype=np.int64)
        seconds, used = np.zeros(len(counts)), np.zeros(len(counts), dtype=np.int64)
        steps: list[tuple[float, int, int, int, float, int]] = []
        for number, variants in enumerate(self.variants):
            working[number, : len(variants)] = [variant.working_bytes for variant in variants]
            hull = _hull(variants, weights, flight)
            seconds += counts[:, number] * hull[0][0]
            used += counts[:, number] * hull[0][1]
            taken[:, number, hull[0][2]] = counts[:, number]
            for before, after in pairwise(hull):
                slower, saved = after[0] - before[0], before[1] - after[1]
                steps.append((slower / saved, number, before[2], after[2], slower, saved))
        least = seconds.copy()
        if math.isinf(budget):
            return Mixes(least, seconds, taken)
        for _, number, faster, smaller, slower, saved in sorted(steps):
            need = used + ((taken > 0) * working).max(axis=(1, 2)) - budget
            if not (need > 0).any():
                break
            count = taken[:, number, faster]
            least += np.clip((used - budget) / saved, 0, count) * slower
            over = np.maximum(need, used + working[number, smaller] - budget)
            moved = np.where(need > 0, np.clip(np.ceil(over / saved), 0, count), 0).astype(np.int64)
            taken[:, number, faster] -= moved
            taken[:, number, smaller] += moved
            seconds += moved * slower
            used -= moved * saved
        fits = used + ((taken > 0) * working).max(axis=(1, 2)) <= budget
        return Mixes(np.where(used <= budget, least, np.inf), np.where(fits, seconds, np.inf), taken)

    def bound_s(self) -> float:
        """Return a lower bound on the makespan of any placement; infinite when none fits the budget."""
        if self.found_s is None:
            self.found_s = self._bound_s()
        return self.found_s

    def _bound_s(self) -> float:
        schedule = self.schedule
        share = max(self._share_bound(homeward=False), self._share_bound(homeward=True))
        if schedule.num_stages == len(self.regions):
            share = max(share, simulate_schedule(schedule, [_least_cost(region) for region in self.regions]).makespan_s)
        if schedule.chunks > 1:
            return share
        through = [table + self._ways(stage)[:, None] for stage, table in enumerate(self._times(1.0, self._through()))]
        turned = [
            table + self._turn(stage)[:, None] for stage, table in enumerate(self._times(1.0, self._after_turns()))
        ]
        return max(share, self._cut(through)[0], self._cut(turned)[0])

    def _share_bound(self, homeward: bool) -> float:
        """Return a rank's share of all work, behind the way to it, with the step's end or with the way back from it."""
        number, num = self.schedule.num_micro_batches, self.schedule.num_ranks
        back = homeward and all(row[-1].kind in (BACKWARD, BACKWARD_INPUT) for row in self.schedule.actions)
        weights = Weights(number, number, number, 0.0 if homeward else 1.0)
        whole = self._mix(self.between[:1, -1], weights, self._least_flight(), self._budget(num))
        ways = self._least_sums(Weights(1.0, 1.0 if back else 0.0, 0.0, 0.0))
        # The first stage of rank r has at least r regions before it.
        return (float(whole.least_s[0]) + float(ways[:num].sum())) / num

    def _budget(self, share: float) -> float:
        return math.inf if self.budget is None else self.budget * share

    def _all(self) -> Weights:
        number = self.schedule.num_micro_batches
        return Weights(number, number, number)

    def _alls(self) -> list[Weights]:
        return [self._all()] * self.schedule.num_stages

    def _ends(self, stage: int) -> float:
        """Return 1 where the end of the step on the stage's own rank follows its work, 0 where the way home does."""
        return 0.0 if stage and self._home(self.schedule.rank_of(stage)).input else 1.0

    def _through(self) -> list[Weights]:
        """Return all the work of every stage, which is the only one of its rank."""
        number = self.schedule.num_micro_batches
        return [Weights(number, number, number, self._ends(stage)) for stage in range(self.schedule.num_stages)]

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
        for flight, weight in zip(self.flight, weights, strict=True):
            if (flight, weight) not in tables:
                found = self._mixes(weight, flight, self._budget(share))
                seconds = found.least_s if least else found.seconds
                table = seconds[self.kind_of.ravel()].reshape(self.legal.shape)
                tables[flight, weight] = np.where(self.legal, table, np.inf)
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
        for rank, row in enumerate(self.schedule.actions):
            turn = next(at for at, action in enumerate(row) if action.kind in (BACKWARD, BACKWARD_INPUT))
            after = Counter(action.kind for action in row[turn + 1 :])
            forwards = after[FORWARD] + (self.schedule.num_micro_batches - 1 if self.schedule.name == "gpipe" else 0)
            inputs, weights = after[BACKWARD] + after[BACKWARD_INPUT], after[BACKWARD] + after[BACKWARD_WEIGHT]
            out.append(Weights(forwards, inputs, weights, self._ends(rank)))
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
            found = self._mixes(weights[stage], self.flight[stage], self._budget(share))
            left = found.taken[self.kind_of.reshape(self.legal.shape)[first, end]].copy()
            for number in self.classes[first:end]:
                variant = int(np.argmax(left[number] > 0))
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
