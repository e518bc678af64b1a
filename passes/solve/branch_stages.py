"""Branch and bound over stage cuts: relaxed programs with rows of paths, branched by how many regions lie where.

A small table's relaxed program is solved as a whole where its paths come slowly (``event_program``). What a stage can't
have at all is found out at the root, one stage after the other: a layer more than it would like is often too much, and
with all stages so bounded little is left to branch on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from ..schedules import Schedule
from ..simulate_schedule import StageCost, longest_paths, simulate_schedule
from .event_program import EventProgram, solves_events
from .fill_memory import fill_memory
from .layout_graph import Floats, Ints
from .path_program import Limits, PathProgram, Relaxed
from .stage_model import group_runs
from .stage_records import Region, stage_costs
from .stages import Placement, first_paths
from .trade_variants import trade_variants

CLOSE = 1e-4
"""Relative distance from the makespan of its own answer at which a relaxed program has nothing more to learn."""

PATHS = 2
"""Paths of each simulation that become rows: to the ranks that end last."""

PATIENCE, ROOT_PATIENCE, SLOW = 6, 12, 0.1
"""So many answers that close less than this part of the gap are enough, at the root more: its rows serve everywhere."""

ROWS, RECENT = 150, 12
"""With more rows, those of paths that did not matter to so many answers are left out at the next branch."""

FEW, PROBES, PASSES = 3, 8, 4
"""Answers by paths before all events are solved for, and to rule a count out; so many probes in vain are enough; how
often all counts are probed."""

EVENTS = 10
"""Programs of paths that a program of all events counts as."""

KEPT = 60
"""Answers for which the row of a mean of paths is kept."""

WHOLE = 1e-5
"""A count so near a whole number is one."""

VARIED = 2
"""The first of ``PathProgram.levels`` that tells variants apart."""

WALKED, STEPS = 400_000, 60
"""Actions that are simulated on walks from placements at most, and placements of one walk."""


@dataclass(frozen=True)
class Branched:
    """What was found.

    Attributes:
        placement: the best.
        bound_s: no placement has a smaller makespan; infinite when nothing fits.
        programs: linear programs solved.
    """

    placement: Placement
    bound_s: float
    programs: int


def branch_stages(
    regions: Sequence[Region],
    start: Placement,
    budget: int | None = None,
    *,
    pinned: Sequence[int] = (),
    enough_s: float = math.inf,
    slack: float = 0.0,
    max_programs: int = 400,
) -> Branched:
    """Return a placement as good as ``start`` or better, and a bound for all of them.

    Every answer of the relaxed program is simulated, and so is a point between it and the last such point, which begins
    at ``start``: paths of points inside cut deeper than those of corners (Ben-Ameur and Neto 2007). When paths add
    nothing more, the counts of regions on a rank, then on a stage, that are no whole numbers are branched on; then what
    the regions of a rank need at work, where it is too full with that; then the counts of variants. Answers are rounded
    to placements on the way, and the variants of those with new cuts are improved by a walk.

    Args:
        regions, budget, pinned: as ``place_stages``.
        start: a placement.
        enough_s: a bound no less than this needs not be raised.
        slack: the relative gap at which a part of the tree is left.
        max_programs: linear programs at most; then the bound is that of what is left.
    """
    search = _Branching(regions, start, budget, pinned, enough_s, slack, max_programs)
    bound_s = search.run()
    best = search.best
    bound_s = max(bound_s, best.bound_s)
    return Branched(replace(best, bound_s=min(bound_s, best.makespan_s)), bound_s, search.programs)


def relaxed_bound(regions: Sequence[Region], schedule: Schedule, budget: int | None) -> float:
    """Return a lower bound on the makespan of any placement, by one path a rank; infinite when nothing fits.

    It knows what the stages of a rank keep together at its fullest moments, and costs one linear program.
    """
    program = PathProgram(group_runs(regions), schedule, budget)
    for path in first_paths(schedule):
        program.add_path(path)
    found = program.solve()
    if found is None:
        return math.inf if program.is_empty() else 0.0
    return found.bound_s


@dataclass(eq=False)
class _Branching:
    regions: Sequence[Region]
    best: Placement
    budget: int | None
    pinned: Sequence[int]
    enough_s: float
    slack: float
    max_programs: int
    programs: int = 0
    inside: tuple[StageCost, ...] = ()
    tried: set[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=set)
    ruled: dict[int, Limits] = field(default_factory=dict)
    ruled_s: float = math.inf
    walked: set[tuple[int, ...]] = field(default_factory=set)
    left_actions: int = WALKED

    def __post_init__(self) -> None:
        self.schedule = self.best.schedule
        self.program = PathProgram(group_runs(self.regions), self.schedule, self.budget)
        for path in (*first_paths(self.schedule), self.best.simulation.path):
            self.program.add_path(path)
        self.num_actions = sum(map(len, self.schedule.actions))
        self._walk(self.best)
        self.inside = self.best.costs
        self.events = EventProgram(self.program) if solves_events(self.schedule) else None

    @property
    def wanted_s(self) -> float:
        """The bound at which nothing more is to be done."""
        return min(self.enough_s, self.best.makespan_s * (1.0 - self.slack))

    def run(self) -> float:
        """Return the bound."""
        leaves_s = math.inf
        waiting: list[tuple[float, Mapping[int, Limits]]] = [(0.0, {})]
        while waiting:
            low_s, limits = waiting.pop()
            if self.programs >= self.max_programs or low_s >= self.wanted_s:
                leaves_s = min(leaves_s, low_s if low_s >= self.wanted_s else self._last_bound(low_s, limits))
                continue
            bound_s, answer = self._bound(low_s, limits)
            if not limits:
                bound_s, answer = self._tighten(bound_s, answer)
            parts: list[Mapping[int, Limits]] = []
            if answer is not None and bound_s < self.wanted_s:
                self._round(answer)
                parts = self._parts(answer, limits)
            if answer is not None and not parts and bound_s < self.wanted_s and not answer.converged:
                bound_s, answer = self._converge(bound_s, limits, self.max_programs)
                if answer is not None:
                    self._round(answer)
                    parts = self._parts(answer, limits)
            if not parts:
                leaves_s = min(leaves_s, bound_s)
            waiting += [(bound_s, part) for part in parts]
        return min(leaves_s, self.ruled_s)

    def _bound(self, low_s: float, limits: Mapping[int, Limits], few: int = FEW) -> tuple[float, Relaxed | None]:
        """Return the bound within limits and the answer, by paths and, where they come slowly, by all events."""
        self._restart(limits)
        if self.events is None:
            return self._converge(low_s, limits, PATIENCE if limits else ROOT_PATIENCE)
        bound_s, answer = self._converge(low_s, limits, few)
        if answer is None or bound_s >= self.wanted_s or self.programs >= self.max_programs:
            return bound_s, answer
        self.programs += EVENTS
        found = self.events.solve(self.program)
        if found is not None:
            self.program.add_path(found.path, KEPT)
            closer = self.program.solve()
            bound_s = max(bound_s, closer.bound_s if closer is not None else 0.0)
            answer = self.program.relaxed(found.taken, bound_s, converged=True)
        return bound_s, answer

    def _tighten(self, low_s: float, answer: Relaxed | None) -> tuple[float, Relaxed | None]:
        """Rule out counts of regions on single stages, and return the bound and the answer without them."""
        for _ in range(PASSES):
            if answer is None or low_s >= self.wanted_s or self.programs >= self.max_programs:
                break
            self._round(answer)
            self.ruled_s = min(self.ruled_s, self.program.leave_out(self.wanted_s))
            before = dict(self.ruled)
            self._raise_needs()
            if not self._probe(answer.counts, low_s):
                return math.inf, None
            if self.ruled == before:
                break
            low_s, answer = self._bound(low_s, {})
        return low_s, answer

    def _raise_needs(self) -> None:
        """Try every rank without regions that need so much at work, size by size: what it can't do without it has."""
        done: set[int] = set()
        for group, (rank, _) in self.program.needs.items():
            if rank in done or self.ruled.get(group, (0.0, 0.0))[0] >= 1.0:
                continue
            if self.programs >= self.max_programs:
                return
            self.programs += 1
            self._restart({group: (0.0, 0.0)})
            found = self.program.solve()
            bound_s = found.bound_s if found is not None else math.inf if self.program.is_empty() else 0.0
            if bound_s < self.wanted_s:
                done.add(rank)
                continue
            self.ruled_s = min(self.ruled_s, bound_s)
            self.ruled[group] = (1.0, float(len(self.regions)))

    def _probe(self, counts: Floats, low_s: float) -> bool:
        """Try for every stage the next whole number of regions on either side of an answer's, the farthest first.

        Returns:
            Whether anything is left: not where both sides of a stage are ruled out.
        """
        sides = []
        for group in range(self.program.levels[1], self.program.levels[2]):
            below = math.floor(counts[group] + WHOLE)
            sides.append((below + 1.0 - counts[group], group, below, True))
            if counts[group] > below + WHOLE:
                sides.append((counts[group] - below, group, below, False))
        misses = 0
        for _, group, below, up in sorted(sides, reverse=True):
            low, high = self.ruled.get(group, (0.0, float(len(self.regions))))
            halves = ((low, float(below)), (below + 1.0, high))
            kept, tested = halves if up else halves[::-1]
            if tested[0] > tested[1] or misses >= PROBES or self.programs >= self.max_programs:
                continue
            bound_s, _ = self._bound(low_s, {group: tested}, 1)
            misses += 1
            if bound_s >= self.wanted_s:
                misses = 0
                self.ruled_s = min(self.ruled_s, bound_s)
                if kept[0] > kept[1]:
                    return False
                self.ruled[group] = kept
        return True

    def _last_bound(self, low_s: float, limits: Mapping[int, Limits]) -> float:
        """Return the bound of a part that is left: by the rows that there are now, not by those of its begin."""
        self._restart(limits)
        found = self.program.solve()
        if found is None:
            return math.inf if self.program.is_empty() else low_s
        return max(low_s, found.bound_s)

    def _restart(self, limits: Mapping[int, Limits]) -> None:
        """Go on within limits, without rows that have not mattered for long."""
        if len(self.program.paths) > ROWS:
            self.program = self.program.without_idle(RECENT)
        self.program.restrict({**self.ruled, **limits})

    def _converge(
        self, low_s: float, limits: Mapping[int, Limits], patience: int, most: float = math.inf
    ) -> tuple[float, Relaxed | None]:
        """Add rows of paths until they add nothing, ``most`` times; return the bound, and the last answer if any."""
        answer: Relaxed | None = None
        reached: list[float] = []
        while self.programs < self.max_programs and len(reached) < most:
            self.programs += 1
            if len(self.program.paths) > 2 * ROWS:
                self._restart(limits)
            found = self.program.solve()
            if found is None and not self.program.is_empty():  # the solver gave up: fewer rows may do
                self.program = self.program.without_idle(RECENT)
                self.program.restrict({**self.ruled, **limits})
                found = self.program.solve()
            if found is None:
                return (math.inf if self.program.is_empty() else low_s), None
            low_s, answer = max(low_s, found.bound_s), found
            corner = longest_paths(self.schedule, found.costs)[:PATHS]
            reached.append(low_s)
            least = max(SLOW * (self.wanted_s - low_s), CLOSE * low_s)
            slow = len(reached) > patience and low_s - reached[-patience - 1] < least
            if slow or low_s >= self.wanted_s or corner[0][0] <= low_s * (1.0 + CLOSE):
                break
            self.inside = _between(found.costs, self.inside)
            new = [
                self.program.add_path(path) for _, path in (*corner, *longest_paths(self.schedule, self.inside)[:PATHS])
            ]
            if not any(new):
                break
        return low_s, answer

    def _parts(self, answer: Relaxed, limits: Mapping[int, Limits]) -> list[Mapping[int, Limits]]:
        """Return both halves of the count that is farthest from whole, the nearer one last; none if all are whole."""
        counts = answer.counts
        off = np.abs(counts - np.round(counts))
        for kind, (begin, end) in enumerate(pairwise(self.program.levels)):
            if kind == VARIED and (parts := self._split_needs(answer, limits)):
                return parts
            if off[begin:end].max(initial=0.0) > WHOLE:
                group = int(np.argmax(off[begin:end])) + begin
                low, high = limits.get(group, self.ruled.get(group, (0.0, float(len(self.regions)))))
                below, above = math.floor(counts[group]), math.ceil(counts[group])
                halves: list[Mapping[int, Limits]] = [
                    {**limits, group: (low, float(below))},
                    {**limits, group: (float(above), high)},
                ]
                return halves if counts[group] - below > 0.5 else halves[::-1]
        return []

    def _split_needs(self, answer: Relaxed, limits: Mapping[int, Limits]) -> list[Mapping[int, Limits]]:
        """Return a rank that is too full without, and with, regions that need much at work; none if all ranks fit."""
        full, free = self.program.overfull(answer.taken), {**self.ruled, **limits}
        open_ = [
            (min(answer.counts[group], 1.0), size, group)
            for group, (rank, size) in self.program.needs.items()
            if rank in full and answer.counts[group] > WHOLE and free.get(group, (0.0, 1.0))[0] < 1.0
        ]
        if not open_:
            return []
        _, _, group = max(open_)
        return [{**limits, group: (0.0, 0.0)}, {**limits, group: (1.0, float(len(self.regions)))}]

    def _round(self, answer: Relaxed) -> None:
        """Try the placement nearest to an answer."""
        firsts = self._firsts(answer.taken)
        if not set(self.pinned) <= set(firsts):
            return
        variants: tuple[int, ...] | None = self.program.nearest_variants(answer.taken, firsts)
        if variants is not None and self.budget is not None:
            variants = fill_memory(self.regions, self.schedule, self.budget, firsts, variants)
        if variants is None or (firsts, variants) in self.tried:
            return
        self.tried.add((firsts, variants))
        costs = stage_costs(self.regions, firsts, variants)
        simulation = simulate_schedule(self.schedule, costs)
        self.program.add_path(simulation.path)
        found = Placement(self.schedule, firsts, variants, costs, simulation, self.best.bound_s, self.programs)
        if found.makespan_s < self.best.makespan_s:
            self.best = found
        if firsts not in self.walked:
            self._walk(found)

    def _walk(self, start: Placement) -> None:
        """Look for a faster placement with the cuts of one: from it, or from its fastest variants that fit."""
        self.walked.add(start.firsts)
        steps = min(STEPS, self.left_actions // self.num_actions)
        if not steps:
            return
        self.left_actions -= steps * self.num_actions
        begin = start
        if self.budget is not None:
            fastest = [region.fastest(self.schedule.num_micro_batches) for region in self.regions]
            variants = fill_memory(self.regions, self.schedule, self.budget, start.firsts, fastest)
            if variants is not None:
                costs = stage_costs(self.regions, start.firsts, variants)
                filled = simulate_schedule(self.schedule, costs)
                if filled.makespan_s < start.makespan_s:
                    begin = replace(start, variants=variants, costs=costs, simulation=filled)
        found = trade_variants(self.regions, begin, self.budget, steps)
        if found.makespan_s < self.best.makespan_s:
            self.best = found

    def _firsts(self, taken: Floats) -> tuple[int, ...]:
        """Return the first regions of stages whose sizes are nearest to an answer's."""
        num_stages, size = self.schedule.num_stages, len(self.regions)
        sizes = np.bincount(self.program.stage_of, weights=taken, minlength=num_stages)
        ends: Ints = np.round(np.cumsum(sizes)).astype(np.int64)
        firsts = [0]
        for stage in range(1, num_stages):
            firsts.append(min(max(int(ends[stage - 1]), firsts[-1] + 1), size - num_stages + stage))
        return tuple(firsts)


def _between(one: Sequence[StageCost], other: Sequence[StageCost]) -> tuple[StageCost, ...]:
    """Return the point half way between two: only seconds matter."""
    return tuple(
        StageCost(
            (a.forward_s + b.forward_s) / 2,
            (a.input_s + b.input_s) / 2,
            (a.weight_s + b.weight_s) / 2,
            (a.send_s + b.send_s) / 2,
            step_s=(a.step_s + b.step_s) / 2,
        )
        for a, b in zip(one, other, strict=True)
    )
