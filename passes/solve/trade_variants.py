"""Walk from a placement to a faster one with the same cuts: what is slow goes where the longest path does not run.

Filling a rank knows how much its regions take in all. Which of a rank's stages are to run the slower variants is
another question: all cost the rank the same, but the longest path runs through some stages many times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..simulate_schedule import Path, peak_bytes, simulate_schedule
from .stage_records import Region, Variant, stage_costs
from .stages import Placement

LEAST = 1e-9
"""Seconds below which nothing is gained, as a part of the makespan."""

Choice = tuple[int, ...]
"""The variant of every region."""


def trade_variants(regions: Sequence[Region], start: Placement, budget: int | None, most: int) -> Placement:
    """Return ``start``, or a faster placement with its cuts that fits ``budget``, after ``most`` simulations at most.

    Every step takes the change that shortens the longest path most, and has not been tried: two like regions of one
    rank swap their variants, or one takes another. It is taken even if another path is then longer than that one was:
    the walk passes over such placements to better ones, and the best on the way is kept.
    """
    walk = _Walk(regions, start, budget)
    best = now = start
    for _ in range(most):
        variants = walk.next(now)
        if variants is None:
            break
        costs = stage_costs(regions, start.firsts, variants)
        now = replace(now, variants=variants, costs=costs, simulation=simulate_schedule(start.schedule, costs))
        if now.makespan_s < best.makespan_s:
            best = now
    return replace(best, bound_s=min(start.bound_s, best.makespan_s))


class _Walk:
    """The changes of one placement's variants, and what has been tried."""

    def __init__(self, regions: Sequence[Region], start: Placement, budget: int | None) -> None:
        self.regions, self.schedule, self.budget, self.firsts = regions, start.schedule, budget, start.firsts
        ends = [*start.firsts[1:], len(regions)]
        self.stage_of = [
            stage for stage, (first, end) in enumerate(zip(start.firsts, ends, strict=True)) for _ in range(first, end)
        ]
        known: dict[tuple[Variant, ...], int] = {}
        self.classes = [known.setdefault(region.variants, len(known)) for region in regions]
        self.tried = {self._key(start.variants)}

    def _key(self, variants: Choice) -> tuple[tuple[int, int, int], ...]:
        """Return what tells placements apart: which regions of a stage have which variants does not."""
        return tuple(sorted(zip(self.stage_of, self.classes, variants, strict=True)))

    def next(self, now: Placement) -> Choice | None:
        """Return the best change of a placement that fits and is new; None if there is none."""
        least_s = LEAST * now.makespan_s
        changes = [change for change in self._changes(now.variants, now.simulation.path) if change[0] > least_s]
        for _, _, variants in sorted(changes, key=lambda change: (-change[0], change[1])):
            key = self._key(variants)
            if key in self.tried:
                continue
            self.tried.add(key)
            costs = stage_costs(self.regions, self.firsts, variants)
            if self.budget is None or max(peak_bytes(self.schedule, costs)) <= self.budget:
                return variants
        return None

    def _changes(self, variants: Choice, path: Path) -> Iterator[tuple[float, tuple[int, int], Choice]]:
        """Yield every change: the seconds that it takes from the path, what tells it apart, the variants after it."""
        alike: dict[tuple[int, int], dict[tuple[int, int], int]] = {}
        for at, (stage, kind, number) in enumerate(zip(self.stage_of, self.classes, variants, strict=True)):
            alike.setdefault((self.schedule.rank_of(stage), kind), {}).setdefault((stage, number), at)
        for regions in alike.values():
            for (stage, number), at in regions.items():
                for other in range(len(self.regions[at].variants)):
                    if other != number:
                        yield self._saved(path, at, number, other), (at, other), _with(variants, {at: other})
                for (other_stage, other), peer in regions.items():
                    if at < peer and stage != other_stage and number != other:
                        saved_s = self._saved(path, at, number, other) + self._saved(path, peer, other, number)
                        yield saved_s, (at, len(variants) + peer), _with(variants, {at: other, peer: number})

    def _saved(self, path: Path, at: int, before: int, after: int) -> float:
        """Return the seconds that another variant of a region takes from a path."""
        times = [
            self._seconds(path, self.stage_of[at], self.regions[at].variants[number]) for number in (before, after)
        ]
        return times[0] - times[1]

    def _seconds(self, path: Path, stage: int, variant: Variant) -> float:
        return (
            path.get((stage, "forward"), 0) * variant.forward_s
            + path.get((stage, "input"), 0) * variant.input_s
            + path.get((stage, "weight"), 0) * variant.weight_s
            + path.get((stage, "step"), 0) * variant.step_s
        )


def _with(variants: Choice, changes: dict[int, int]) -> Choice:
    out = list(variants)
    for at, number in changes.items():
        out[at] = number
    return tuple(out)
