"""The whole relaxed program of stage cuts: when every action of a schedule's table ends, in one linear program.

Rows of paths reach its optimum too, but take hundreds of programs on the way where many paths are nearly longest. Its
dual values weigh the arcs between actions; every flow along arcs is a mean of paths, so the one row of that mean gives
the path program the same bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix, csr_matrix, hstack, vstack

from ..schedules import Schedule
from ..simulate_schedule import TERMS, Path, Term, dependencies, last_actions
from .layout_graph import Floats, Ints
from .path_program import PathProgram

MOST_ACTIONS = 6000
"""Actions of a table up to which the program is solved in some seconds."""

_STEP = len(TERMS)
"""Index of the step's end behind the kinds of actions."""


@dataclass(frozen=True)
class Events:
    """An answer: how many regions every column has, and the mean of paths that proves that no less time is enough."""

    taken: Floats
    path: Path


class EventProgram:
    """The program of one schedule and one model's columns.

    Variables: regions of every column, as in ``PathProgram``; the seconds of every stage's kinds of actions; the end of
    every action; the makespan.

    Args:
        program: its columns, costs and seconds of sending.
    """

    def __init__(self, program: PathProgram) -> None:
        self.schedule = program.schedule
        self.order = dependencies(self.schedule)
        self.num_columns = len(program.columns)
        self.kinds: dict[tuple[int, int], int] = {}
        for stage, kind, *_ in self.order:
            self.kinds.setdefault((stage, kind), len(self.kinds))
        for stage in range(self.schedule.num_stages):
            self.kinds.setdefault((stage, _STEP), len(self.kinds))
        self.first_end = self.num_columns + len(self.kinds)
        self.makespan = self.first_end + len(self.order)
        self.seconds = self._seconds(program)
        self._add_arcs(program.send_s)

    def _seconds(self, program: PathProgram) -> csr_matrix:
        """Return the rows that make seconds of the columns: their sum less the seconds is nothing."""
        rows, columns, values = [], [], []
        for (stage, kind), row in self.kinds.items():
            fields = [3] if kind == _STEP else [("forward", "input", "weight").index(term) for term in TERMS[kind]]
            here = np.flatnonzero(program.stage_of == stage)
            rows += [row] * (len(here) + 1)
            columns += [*here.tolist(), self.num_columns + row]
            values += [*program.costs[here][:, fields].sum(axis=1).tolist(), -1.0]
        return coo_matrix((values, (rows, columns)), (len(self.kinds), self.makespan + 1)).tocsr()

    def _add_arcs(self, send_s: float) -> None:
        """Make a row for every arc: what comes before, the sending and the action's seconds are no more than its end.

        The first arc of action ``a`` comes from its rank, the second from where its operand comes; ``arcs`` has the
        number of both (-1 where there is none), and those to the end of the step follow.
        """
        rows: list[tuple[int, int, int]] = []
        sends: list[float] = []
        self.arcs: Ints = np.full((len(self.order), 2), -1, dtype=np.int64)
        for at, (stage, kind, before, source, send) in enumerate(self.order):
            work = self.num_columns + self.kinds[stage, kind]
            for side, (comes, send_here) in enumerate(((before, 0.0), (source, send_s if send >= 0 else 0.0))):
                if comes >= 0 or (side == 0 and source < 0):
                    self.arcs[at, side] = len(rows)
                    rows.append((self.first_end + comes if comes >= 0 else -1, work, self.first_end + at))
                    sends.append(send_here)
        self.num_inner = len(rows)
        entries = [
            (row, column, value)
            for row, (comes, work, end) in enumerate(rows)
            for column, value in ((comes, 1.0), (work, 1.0), (end, -1.0))
            if column >= 0
        ]
        for rank, last in enumerate(last_actions(self.schedule)):
            row = self.num_inner + rank
            entries += [(row, self.first_end + last, 1.0), (row, self.makespan, -1.0)]
            for stage in self.schedule.stages_of(rank):
                entries.append((row, self.num_columns + self.kinds[stage, _STEP], 1.0))
            sends.append(0.0)
        row_of, column_of, values = zip(*entries, strict=True)
        self.rows = coo_matrix((values, (row_of, column_of)), (len(sends), self.makespan + 1)).tocsr()
        self.limits: Floats = -np.array(sends)

    def solve(self, program: PathProgram) -> Events | None:
        """Return the answer within the limits of ``program``; None when there is none or the solver gave up."""
        weights, low, high = program.fixed_rows()
        fixed = hstack([csr_matrix(weights), csr_matrix((len(weights), self.makespan + 1 - self.num_columns))]).tocsr()
        equal = low == high
        above, below = ~equal & np.isfinite(high), ~equal & np.isfinite(low)
        cost = np.zeros(self.makespan + 1)
        cost[-1] = 1.0
        most = np.concatenate([program.most, np.full(self.makespan + 1 - self.num_columns, np.inf)])
        result = linprog(
            cost,
            A_ub=vstack([self.rows, fixed[above], -fixed[below]]),
            b_ub=np.concatenate([self.limits, high[above], -low[below]]),
            A_eq=vstack([self.seconds, fixed[equal]]),
            b_eq=np.concatenate([np.zeros(len(self.kinds)), high[equal]]),
            bounds=np.stack([np.zeros(self.makespan + 1), most], axis=1),
            method="highs-ipm",
        )
        if result.status != 0:
            return None
        shares = np.maximum(-result.ineqlin.marginals[: len(self.limits)], 0.0)
        return Events(np.asarray(result.x[: self.num_columns]).clip(0.0), self._mean_path(shares))

    def _mean_path(self, shares: Floats) -> Path:
        """Return the mean of paths along which one unit flows back from the end of the step, as arcs' shares say.

        Whatever the shares are, what flows into an action flows out of it: the mean of paths is one to rounding.
        """
        ends = shares[self.num_inner :]
        ends = ends / ends.sum() if ends.sum() > 0.0 else np.full(len(ends), 1.0 / len(ends))
        flow = np.zeros(len(self.order))
        path: dict[Term, float] = {}
        for rank, last in enumerate(last_actions(self.schedule)):
            flow[last] += ends[rank]
            for stage in self.schedule.stages_of(rank) if ends[rank] else ():
                path[stage, "step"] = path.get((stage, "step"), 0.0) + float(ends[rank])
        for at in range(len(self.order) - 1, -1, -1):
            if flow[at] <= 0.0:
                continue
            stage, kind, before, source, send = self.order[at]
            for term in TERMS[kind]:
                path[stage, term] = path.get((stage, term), 0.0) + float(flow[at])
            late = _late_share(shares, self.arcs[at])
            if before >= 0:
                flow[before] += flow[at] * (1.0 - late)
            if source >= 0 and late:
                flow[source] += flow[at] * late
                if send >= 0:
                    path[send, "send"] = path.get((send, "send"), 0.0) + float(flow[at] * late)
        return path


def _late_share(shares: Floats, arcs: Ints) -> float:
    """Return the part of an action's flow that comes from its operand, not from its rank."""
    if arcs[0] < 0 or arcs[1] < 0:
        return 0.0 if arcs[1] < 0 else 1.0
    both = float(shares[arcs[0]] + shares[arcs[1]])
    return float(shares[arcs[1]]) / both if both > 0.0 else 0.0


def solves_events(schedule: Schedule) -> bool:
    """Tell whether a schedule's table is small enough."""
    return sum(map(len, schedule.actions)) <= MOST_ACTIONS
