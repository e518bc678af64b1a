"""A bound on the makespan of every placement, for any schedule, that depth does not slow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as fields_of

from ..schedules import Schedule
from ..simulate_schedule import StageCost, Term, longest_paths
from .path_program import PathProgram
from .stage_model import group_runs
from .stage_records import Region

CLOSE = 1e-4
"""Relative distance from the makespan of its own answer at which a relaxed program has nothing more to learn."""

PATHS = 2
"""Paths of each simulation that become rows: to the ranks that end last."""


@dataclass(frozen=True)
class PathBound:
    """What ``path_bound`` found: the bound, infinite when nothing fits; linear programs solved; rows."""

    bound_s: float
    rounds: int
    rows: int


def path_bound(
    regions: Sequence[Region],
    schedule: Schedule,
    budget: int | None = None,
    *,
    paths: Sequence[Mapping[Term, int]] = (),
    near: Sequence[StageCost] = (),
    enough_s: float = math.inf,
    max_rounds: int = 60,
) -> PathBound:
    """Return a lower bound on the makespan: regions shared out in fractions, with rows of paths until they add nothing.

    Every answer of the relaxed program is simulated, and so is a point between it and the last such point, which begins
    at a good placement: paths of points inside cut deeper than those of corners (Ben-Ameur and Neto 2007).

    Args:
        regions, schedule, budget: as ``place_stages``.
        paths: rows to begin with.
        near: costs of the stages of a good placement.
        enough_s: stop at a bound that is no less than this.
        max_rounds: linear programs at most; every one of them gives a bound.
    """
    program = PathProgram(group_runs(regions), schedule, budget)
    for path in paths:
        program.add_path(path)
    best_s, inside = 0.0, tuple(near)
    for rounds in range(1, max_rounds + 1):
        found = program.solve()
        if found is None:
            return PathBound(math.inf if program.is_empty() else best_s, rounds, len(program.paths))
        best_s = max(best_s, found.bound_s)
        corner = longest_paths(schedule, found.costs)[:PATHS]
        if best_s >= enough_s or corner[0][0] <= best_s * (1.0 + CLOSE):
            break
        inside = _between(found.costs, inside) if inside else found.costs
        new = [program.add_path(path) for _, path in (*corner, *longest_paths(schedule, inside)[:PATHS])]
        if not any(new):
            break
    return PathBound(best_s, rounds, len(program.paths))


def _between(one: Sequence[StageCost], other: Sequence[StageCost]) -> tuple[StageCost, ...]:
    """Return the point half way between two: only seconds matter."""
    seconds = [field.name for field in fields_of(StageCost) if field.name.endswith("_s")]
    return tuple(
        StageCost(**{name: (getattr(a, name) + getattr(b, name)) / 2.0 for name in seconds})
        for a, b in zip(one, other, strict=True)
    )
