"""Choose variants anew for given cuts: slower ones where a rank is too full, faster ones where it has room."""

from __future__ import annotations

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

    def _used(self) -> int:
        chosen = {at: self.regions[at].variants[self.variants[at]] for at in self.stage_of}
        saved = [
            sum(flight[self.stage_of[at]] * one.saved_bytes for at, one in chosen.items()) for flight in self.flights
        ]
        state = sum(one.state_bytes for one in chosen.values())
        return state + max(saved) + max(one.working_bytes for one in chosen.values())

    def _seconds(self, variant: Variant) -> float:
        return self.number * (variant.forward_s + variant.input_s + variant.weight_s) + variant.step_s

    def _kinds(self) -> list[int]:
        """Return one region of every stage, variants and choice: others like it are worth as much."""
        return list(
            {(self.stage_of[at], id(self.regions[at].variants), self.variants[at]): at for at in self.stage_of}.values()
        )

    def _changes(self) -> list[tuple[float, int, int, int]]:
        """Return every change of one region: seconds it adds, bytes that are then used, region, variant."""
        out = []
        for at in self._kinds():
            before, now_s = self.variants[at], self._seconds(self.regions[at].variants[self.variants[at]])
            for number, variant in enumerate(self.regions[at].variants):
                if number != before:
                    self.variants[at] = number
                    out.append((self._seconds(variant) - now_s, self._used(), at, number))
            self.variants[at] = before
        return out

    def fit(self, budget: int) -> bool:
        """Take slower variants until the rank fits; tell whether it does."""
        while (used := self._used()) > budget:
            smaller = [change for change in self._changes() if change[1] < used]
            if not smaller:
                return False
            # what more than fits is worth no more
            _, _, at, number = min(
                smaller, key=lambda one: (one[0] / (used - max(one[1], budget)) if one[0] > 0 else one[0], one[1])
            )
            self.variants[at] = number
        return True

    def speed_up(self, budget: int) -> None:
        """Take faster variants while they fit."""
        while faster := [change for change in self._changes() if change[0] < 0 and change[1] <= budget]:
            _, _, at, number = min(faster)
            self.variants[at] = number
