"""Step time against memory: the plans of several budgets between the least that has one and what time alone wants."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autopar.errors import InfeasibleError
from autopar.plans import FrontierPoint, Plan


def trace_frontier(solve: Callable[[int | None], Plan], points: int) -> tuple[FrontierPoint, ...]:
    """Return the best plan of each of ``points`` budgets, the smallest first; more memory never makes a slower plan.

    Args:
        solve: returns the plan for a budget in bytes a rank, None for no bound.
        points: how many, at least 2: the least budget with a plan, what the fastest plan keeps, and steps between.
    """
    fastest = solve(None)
    least = _least_budget(solve)
    most = max(fastest.memory.total_bytes, least)
    budgets = np.unique(np.geomspace(least, most, points).round().astype(np.int64))
    budgets[0], budgets[-1] = least, most
    out: list[FrontierPoint] = []
    best: Plan | None = None
    for budget in budgets.tolist():
        plan = solve(budget)
        if best is None or plan.cost.step_seconds < best.cost.step_seconds:
            best = plan
        out.append(
            FrontierPoint(
                budget_bytes=budget,
                step_seconds=best.cost.step_seconds,
                memory_bytes=best.memory.total_bytes,
                recomputed=len(best.recomputed),
                status=best.solver.status,
            )
        )
    return tuple(out)


def _least_budget(solve: Callable[[int | None], Plan]) -> int:
    try:
        solve(1)
    except InfeasibleError as error:
        return error.least_bytes or 1
    return 1
