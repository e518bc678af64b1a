"""The linear program behind bounds of stage cuts: regions shared out in fractions, with rows of a schedule's paths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from ortools.linear_solver import pywraplp

from ..schedules import Schedule
from ..simulate_schedule import Path, StageCost, Term, fullest_moments
from .layout_graph import Floats, Ints
from .stage_model import Run, unit_bytes, unit_seconds

Limits = tuple[float, float]
"""Least and most regions of a group."""

MUCH = 1e-5
"""Part of a region below which it is not there."""

_FIELDS = ("forward_s", "input_s", "weight_s", "step_s")
_TERMS = ("forward", "input", "weight", "step")


class Row(Protocol):
    """A row of the solver."""

    def dual_value(self) -> float: ...
    def SetBounds(self, low: float, high: float) -> None: ...
    def SetCoefficient(self, variable: Any, value: float) -> None: ...


@dataclass(frozen=True)
class Relaxed:
    """An answer.

    Attributes:
        bound_s: no placement has a smaller makespan.
        costs: of the stages of the fractions.
        counts: how many regions every group has.
        taken: how many regions every column has.
        converged: the bound is the makespan of these costs: rows of paths add nothing.
    """

    bound_s: float
    costs: tuple[StageCost, ...]
    counts: Floats
    taken: Floats
    converged: bool = False


class PathProgram:
    """The program; ``add_path`` adds rows, ``solve`` goes on from its last answer.

    Region ``i`` of ``R`` can lie on stage ``s`` of ``S`` only if ``s <= i <= R - S + s``, for every stage has one. But
    for that regions may lie in any order, and every cut is as cheap as the cheapest. Every rank fits the budget at each
    of its fullest moments, with what the one of its regions needs at work that ``restrict`` says it has at least.

    The bound is computed from the solver's dual values, whatever they are: with the paths weighed by them a makespan is
    a sum over regions, whose least is taken region by region.

    Args:
        runs: the model.
        schedule: the table.
        budget: bytes of a rank, or None.
    """

    def __init__(self, runs: Sequence[Run], schedule: Schedule, budget: int | None) -> None:
        self.runs, self.schedule, self.budget = runs, schedule, budget
        self.solved = 0
        self.used: list[int] = []
        self.unit_s = unit_seconds(runs)
        self.known: dict[tuple[tuple[Term, float], ...], None] = {}
        self.solver: Any = pywraplp.Solver.CreateSolver("GLOP")
        self.status = pywraplp.Solver.NOT_SOLVED
        self.afresh = pywraplp.MPSolverParameters()
        self.afresh.SetIntegerParam(self.afresh.INCREMENTALITY, self.afresh.INCREMENTALITY_OFF)
        self.priced: tuple[float, Floats] = (0.0, np.zeros(0))
        self.makespan = self.solver.NumVar(0.0, self.solver.infinity(), "")
        self.solver.Minimize(self.makespan)
        self._make_columns()
        self.send_s = min(_cuts(runs), default=0.0) / self.unit_s
        self.fixed: list[tuple[Row, Floats, float, float]] = []
        self.paths: list[tuple[Row, Floats, float]] = []
        self.moments: list[tuple[int, int]] = []
        self._add_fixed()
        if budget is not None:
            self._bound_bytes(budget)
        self._list_groups()

    def _make_columns(self) -> None:
        """Make a variable for every stage, run and variant that can meet: so many regions."""
        stages, runs, kinds, most, costs, sizes, needs = [], [], [], [], [], [], []
        spare = sum(run.count for run in self.runs) - self.schedule.num_stages
        first = 0
        for number, run in enumerate(self.runs):
            for stage in range(self.schedule.num_stages):
                there = min(first + run.count - 1, spare + stage) - max(first, stage) + 1
                for kind, variant in enumerate(run.variants if there > 0 else ()):
                    stages.append(stage)
                    runs.append(number)
                    kinds.append(kind)
                    most.append(there)
                    costs.append([getattr(variant, field) / self.unit_s for field in _FIELDS])
                    sizes.append((variant.state_bytes, variant.saved_bytes))
                    needs.append(variant.working_bytes)
            first += run.count
        self.stage_of: Ints = np.array(stages, dtype=np.int64)
        ranks = [self.schedule.rank_of(stage) for stage in stages]
        self.rank_of: Ints = np.array(ranks, dtype=np.int64)
        self.run_of: Ints = np.array(runs, dtype=np.int64)
        self.variant_of: Ints = np.array(kinds, dtype=np.int64)
        self.most: Floats = np.array(most, dtype=np.float64)
        self.whole = self.most
        self.costs: Floats = np.array(costs, dtype=np.float64)
        self.bytes: Floats = np.array(sizes, dtype=np.float64)
        self.working: Floats = np.array(needs, dtype=np.float64)
        self.columns = [self.solver.NumVar(0.0, float(limit), "") for limit in most]

    def _add_fixed(self) -> None:
        """Share out every region, and give every stage at least one."""
        for number, run in enumerate(self.runs):
            self._add((self.run_of == number).astype(np.float64), run.count, run.count)
        most = sum(run.count for run in self.runs) - self.schedule.num_stages + 1
        for stage in range(self.schedule.num_stages):
            self._add((self.stage_of == stage).astype(np.float64), 1, most)

    def _list_groups(self) -> None:
        """List what are whole numbers in a placement; ``levels`` are where each kind of them begins.

        Regions of every run on every rank, then on every stage; then those of every variant of a run, likewise; then
        those on a rank that need so many bytes at work or more, for every rank and every such size.
        """
        several = np.array([run.count > 1 for run in self.runs])[self.run_of]
        parts: list[Floats] = []
        self.levels: list[int] = []
        for kinds, shown in ((0 * self.variant_of, several), (self.variant_of, np.ones_like(several))):
            for place in (self.rank_of, self.stage_of):
                self.levels.append(sum(map(len, parts)))
                keys = np.stack([self.run_of, kinds, place])[:, shown]
                _, group_of = np.unique(keys, axis=1, return_inverse=True)
                part = np.zeros((int(group_of.max(initial=-1)) + 1, len(shown)))
                part[group_of.ravel(), np.flatnonzero(shown)] = 1.0
                parts.append(part)
        self.levels.append(sum(map(len, parts)))
        self.needs: dict[int, tuple[int, float]] = {}
        if self.budget is not None:
            parts += self._list_needs()
        self.groups: Floats = np.concatenate(parts)
        self.rows: dict[int, int] = {}

    def _list_needs(self) -> list[Floats]:
        """Return the groups of regions that need much at work, the least first; ``needs`` is their rank and bytes."""
        parts: list[Floats] = []
        for rank in range(self.schedule.num_ranks):
            sizes = np.unique(self.working[self.rank_of == rank])
            for size in sizes[sizes > 0.0]:
                self.needs[self.levels[-1] + len(parts)] = (rank, float(size))
                parts.append(((self.rank_of == rank) & (self.working >= size)).astype(np.float64)[None])
        return parts

    def counts(self, taken: Floats) -> Floats:
        """Return how many regions every group has."""
        counts: Floats = self.groups @ taken
        return counts

    def fixed_rows(self) -> tuple[Floats, Floats, Floats]:
        """Return the rows besides those of paths: their weights of the columns, and their sides."""
        _, weights, low, high = zip(*self.fixed, strict=True)
        return np.array(weights), np.array(low), np.array(high)

    def nearest_variants(self, taken: Floats, firsts: Sequence[int]) -> tuple[int, ...]:
        """Return for every region the variant of which its stage has most left in an answer, region by region."""
        run_of = [number for number, run in enumerate(self.runs) for _ in range(run.count)]
        left: dict[tuple[int, int], Floats] = {}
        for stage, run in set(zip(self.stage_of.tolist(), self.run_of.tolist(), strict=True)):
            left[stage, run] = taken[(self.stage_of == stage) & (self.run_of == run)].copy()
        out = []
        for stage, (first, end) in enumerate(zip(firsts, [*firsts[1:], len(run_of)], strict=True)):
            for run in run_of[first:end]:
                most = int(np.argmax(left[stage, run]))
                left[stage, run][most] -= 1.0
                out.append(most)
        return tuple(out)

    def restrict(self, limits: Mapping[int, Limits]) -> None:
        """Keep the counts of groups within limits; those of other groups are free again.

        A rank with a region that needs so much at work has that much less for what it keeps. Where a stage has a region
        of a run, no stage before has one of a later run, and no stage behind one of an earlier run.
        """
        self._keep_order(limits)
        for group in sorted({*self.rows, *limits}):
            low, high = limits.get(group, (0.0, float(len(self.columns))))
            if group not in self.rows:
                self.rows[group] = len(self.fixed)
                self._add(self.groups[group], low, high)
            row, weights, _, _ = self.fixed[self.rows[group]]
            row.SetBounds(low, high)
            self.fixed[self.rows[group]] = (row, weights, low, high)
        needed = [0.0] * self.schedule.num_ranks
        for group, (rank, size) in self.needs.items():
            if limits.get(group, (0.0, 0.0))[0] >= 1.0:
                needed[rank] = max(needed[rank], size)
        for at, rank in self.moments:
            row, weights, low, _ = self.fixed[at]
            high = ((self.budget or 0) - needed[rank]) / self.unit_bytes
            row.SetBounds(-self.solver.infinity(), high)
            self.fixed[at] = (row, weights, low, high)

    def _keep_order(self, limits: Mapping[int, Limits]) -> None:
        """Leave out the columns that are out of order with what stages have by the limits."""
        there = np.ones(len(self.columns), dtype=bool)
        for group in range(self.levels[1], self.levels[2]):
            if limits.get(group, (0.0, 0.0))[0] >= 1.0:
                at = int(np.argmax(self.groups[group]))
                ahead, behind = self.stage_of < self.stage_of[at], self.stage_of > self.stage_of[at]
                there &= ~(ahead & (self.run_of > self.run_of[at])) & ~(behind & (self.run_of < self.run_of[at]))
        self._bound_columns(np.where(there, self.whole, 0.0))

    def overfull(self, taken: Floats) -> set[int]:
        """Return the ranks that an answer fills too full with what its regions need at work."""
        out = set()
        for at, rank in self.moments:
            working = self.working[(self.rank_of == rank) & (taken > MUCH)]
            used = float(self.fixed[at][1] @ taken) * self.unit_bytes + working.max(initial=0.0)
            if self.budget is not None and used > self.budget * (1.0 + MUCH):
                out.add(rank)
        return out

    def _bound_bytes(self, budget: int) -> None:
        unit = self.unit_bytes = unit_bytes(self.runs, self.schedule)
        for rank, moments in enumerate(fullest_moments(self.schedule)):
            for moment in moments:
                self.moments.append((len(self.fixed), rank))
                flight = np.zeros(self.schedule.num_stages)
                here = np.zeros(self.schedule.num_stages)
                for stage, count in moment:
                    flight[stage], here[stage] = count, 1.0
                used = here[self.stage_of] * self.bytes[:, 0] + flight[self.stage_of] * self.bytes[:, 1]
                self._add(used / unit, -math.inf, budget / unit)

    def _add(self, weights: Floats, low: float, high: float) -> None:
        self.fixed.append((self._row(weights, low, high), weights, low, high))

    def _row(self, weights: Floats, low: float, high: float) -> Any:
        infinity = self.solver.infinity()
        row = self.solver.Constraint(max(low, -infinity), min(high, infinity))
        for at in np.flatnonzero(weights):
            row.SetCoefficient(self.columns[at], float(weights[at]))
        return row

    def add_path(self, path: Path, ahead: int = 0) -> bool:
        """Add the lower bound that a path of the schedule gives, or the mean of paths; tell whether it is new.

        It counts as used by the answer that is so many answers ahead.
        """
        key = tuple(sorted(path.items()))
        if key in self.known:
            return False
        self.known[key] = None
        self.used.append(self.solved + ahead)
        times = np.zeros((self.schedule.num_stages, len(_TERMS)))
        sent_s = 0.0
        for (stage, term), count in key:
            if term == "send":
                sent_s += count * self.send_s
            else:
                times[stage, _TERMS.index(term)] += count
        weights = (times[self.stage_of] * self.costs).sum(axis=1)
        row = self._row(-weights, sent_s, math.inf)
        row.SetCoefficient(self.makespan, 1.0)
        self.paths.append((row, weights, sent_s))
        return True

    def without_idle(self, recent: int) -> PathProgram:
        """Return a program without the rows of paths that did not matter to the last ``recent`` answers."""
        other = PathProgram(self.runs, self.schedule, self.budget)
        other.keep_below(self.whole)
        for key, used in zip(self.known, self.used, strict=True):
            if self.solved - used < recent:
                other.add_path(dict(key), used - self.solved)
        return other

    def solve(self) -> Relaxed | None:
        """Return the answer by the rows so far; None when nothing fits the budget, or the solver gave up."""
        self.status = self.solver.Solve()
        if self.status != pywraplp.Solver.OPTIMAL:  # its last answer may have led it astray
            self.status = self.solver.Solve(self.afresh)
        if self.status != pywraplp.Solver.OPTIMAL:
            return None
        taken = np.array([column.solution_value() for column in self.columns]).clip(0.0)
        return self.relaxed(taken, self._bound() * self.unit_s)

    def relaxed(self, taken: Floats, bound_s: float, *, converged: bool = False) -> Relaxed:
        """Return the answer in which columns have so many regions."""
        sums = np.zeros((self.schedule.num_stages, len(_FIELDS)))
        np.add.at(sums, self.stage_of, taken[:, None] * self.costs * self.unit_s)
        sends = [self.send_s * self.unit_s] * (self.schedule.num_stages - 1) + [0.0]
        costs = tuple(
            StageCost(forward, inputs, weight, send_s, step_s=step)
            for (forward, inputs, weight, step), send_s in zip(sums.tolist(), sends, strict=True)
        )
        return Relaxed(bound_s, costs, self.counts(taken), taken, converged)

    def leave_out(self, wanted_s: float) -> float:
        """Take from every column what makes an answer slower than wanted, by the last answer's prices of columns.

        Returns:
            A bound on the makespan of every placement that is left out.
        """
        bound, wanted = self.priced[0], wanted_s / self.unit_s
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.where(self.priced[1] > 0.0, (wanted - bound) / self.priced[1], np.inf)
        most = np.minimum(self.whole, np.floor(room.clip(0.0)))
        cut = most < self.whole
        self.keep_below(most)
        least = bound + self.priced[1][cut] * (most[cut] + 1.0)
        return float(least.min(initial=math.inf)) * self.unit_s

    def keep_below(self, most: Floats) -> None:
        """Keep columns at or below so many regions, whatever the limits."""
        self.whole = most
        self._bound_columns(np.minimum(self.most, most))

    def _bound_columns(self, most: Floats) -> None:
        for at in np.flatnonzero(most != self.most):
            self.columns[at].SetUb(float(most[at]))
        self.most = most

    def is_empty(self) -> bool:
        """Tell whether nothing fits the budget."""
        return bool(self.status == pywraplp.Solver.INFEASIBLE)

    def _bound(self) -> float:
        """Return the bound that the dual values prove."""
        shares = np.array([max(0.0, row.dual_value()) for row, _, _ in self.paths])
        self.solved += 1
        self.used = [max(self.solved, used) if share else used for share, used in zip(shares, self.used, strict=True)]
        shares /= max(1.0, float(shares.sum()))
        reduced, bound = np.zeros(len(self.columns)), 0.0
        for share, (_, weights, sent_s) in zip(shares, self.paths, strict=True):
            if share:
                reduced += share * weights
                bound += share * sent_s
        for row, weights, low, high in self.fixed:
            price = row.dual_value()
            if not price or (price > 0.0 and math.isinf(low)):
                continue
            reduced -= price * weights
            bound += price * (low if price > 0.0 else high)
        bound += float(np.minimum(reduced, 0.0) @ self.most)
        self.priced = (bound, reduced)
        return bound


def _cuts(runs: Sequence[Run]) -> list[float]:
    """Return the seconds of sending what crosses each kind of cut; behind the last region is none."""
    inner = [run.inner_s for run in runs if run.count > 1]
    return inner + [run.outer_s for run in runs[:-1]]
