"""Choose variants anew for given cuts: slower ones where a rank is too full, faster ones where it has room.

What the region at work needs besides is needed once on a rank, however many of its regions run so. A variant that keeps
less but needs more at work gains nothing by itself, only with others: so a rank is filled once for every size of what
is left free for the region at work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..schedules import Schedule
from ..simulate_schedule import fullest_moments
from .stage_records import Region, Variant

Moments = Sequence[Sequence[tuple[int, int]]]


def fill_memory(
    regions: Sequence[Region], schedule: Schedule, budget: int, firsts: Sequence[int], variants: Sequence[int]
) -> tuple[int, ...] | None:
    """Return variants that fit ``budget`` on every rank and leave no room for a faster one; None if none were found.

    Greedy: the least seconds of a step for a byte until a rank fits, then the most seconds that still fit.

    Args:
        regions, schedule: as ``place_stages``.
        firsts: the first region of every stage.
        variants: to begin with.
    """
    out = list(variants)
    ends = [*firsts[1:], len(regions)]
    moments = fullest_moments(schedule)
    for rank in range(schedule.num_ranks):
        stage_of = {at: stage for stage in schedule.stages_of(rank) for at in range(firsts[stage], ends[stage])}
        filling = _Filling(regions, schedule.num_micro_batches, stage_of, moments[rank], out)
        if not filling.fit(budget):
            return None
        filling.speed_up(budget)
    return tuple(out)


class _Filling:
    """The regions of one rank; ``variants`` of the whole model are changed in place."""

    def __init__(
        self,
        regions: Sequence[Region],
        num_micro_batches: int,
        stage_of: dict[int, int],
        moments: Moments,
        variants: list[int],
    ) -> None:
        self.regions, self.number, self.stage_of = regions, num_micro_batches, stage_of
        self.flights = [dict(moment) for moment in moments]
        self.variants = variants

    def _variant(self, at: int) -> Variant:
        return self.regions[at].variants[self.variants[at]]

    def _kept(self, at: int, variant: Variant) -> tuple[int, ...]:
        """Return what a region keeps at every moment."""
        stage = self.stage_of[at]
        return tuple(variant.state_bytes + flight[stage] * variant.saved_bytes for flight in self.flights)

    def _sums(self) -> tuple[int, ...]:
        """Return what all regions keep at every moment."""
        return tuple(map(sum, zip(*(self._kept(at, self._variant(at)) for at in self.stage_of), strict=True)))

    def _working(self) -> int:
        return max(self._variant(at).working_bytes for at in self.stage_of)

    def _seconds(self, variant: Variant) -> float:
        return variant.step_seconds(self.number)

    def _all_seconds(self) -> float:
        return math.fsum(self._seconds(self._variant(at)) for at in self.stage_of)

    def _kinds(self) -> list[int]:
        """Return one region of every stage, variants and choice: others like it are worth as much."""
        return list(
            {(self.stage_of[at], id(self.regions[at].variants), self.variants[at]): at for at in self.stage_of}.values()
        )

    def _changes(self, most: int | None = None) -> list[tuple[float, int, int, int]]:
        """Return every change of one region: seconds it adds, bytes that are then kept, region, variant.

        Without ``most`` what the region at work needs is counted among the bytes; else none may need more.
        """
        sums, kinds = self._sums(), self._kinds()
        needs = sorted(((self._variant(at).working_bytes, at) for at in self.stage_of), reverse=True)
        out = []
        for at in kinds:
            now = self._variant(at)
            rest = tuple(total - kept for total, kept in zip(sums, self._kept(at, now), strict=True))
            others = next((size for size, other in needs if other != at), 0)
            for number, variant in enumerate(self.regions[at].variants):
                if number == self.variants[at] or (most is not None and variant.working_bytes > most):
                    continue
                kept = max(map(sum, zip(rest, self._kept(at, variant), strict=True)))
                used = kept + (max(others, variant.working_bytes) if most is None else 0)
                out.append((self._seconds(variant) - self._seconds(now), used, at, number))
        return out

    def fit(self, budget: int) -> bool:
        """Take slower variants until the rank fits; tell whether it does."""
        if max(self._sums()) + self._working() <= budget:
            return True
        begin = {at: self.variants[at] for at in self.stage_of}
        best: dict[int, int] = {}
        best_s = math.inf
        for most in sorted({one.working_bytes for at in begin for one in self.regions[at].variants}):
            if self._begin(begin, most) and self._fit_below(budget - most, most, best_s):
                best, best_s = {at: self.variants[at] for at in begin}, self._all_seconds()
        for at, number in (best or begin).items():
            self.variants[at] = number
        return bool(best)

    def _begin(self, begin: dict[int, int], most: int) -> bool:
        """Begin with variants that need no more than ``most`` at work; tell whether every region has one."""
        for at, number in begin.items():
            variants = self.regions[at].variants
            small = [other for other, one in enumerate(variants) if one.working_bytes <= most]
            if not small:
                return False
            fastest = min(small, key=lambda other: self._seconds(variants[other]))
            self.variants[at] = number if number in small else fastest
        return True

    def _fit_below(self, room: int, most: int, limit_s: float) -> bool:
        """Take slower variants until what is kept fits ``room``; tell whether that takes less than ``limit_s``."""
        while (kept := max(self._sums())) > room:
            smaller = [change for change in self._changes(most) if change[1] < kept]
            if not smaller or self._all_seconds() >= limit_s:
                return False
            # what more than fits is worth no more
            _, _, at, number = min(
                smaller, key=lambda one: (one[0] / (kept - max(one[1], room)) if one[0] > 0 else one[0], one[1])
            )
            self.variants[at] = number
        return self._all_seconds() < limit_s

    def speed_up(self, budget: int) -> None:
        """Take faster variants while they fit."""
        while faster := [change for change in self._changes() if change[0] < 0 and change[1] <= budget]:
            _, _, at, number = min(faster)
            self.variants[at] = number
