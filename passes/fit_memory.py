"""Keep what is alive at once within the budget: solve, lower, look, and solve again with a reserve."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from autopar.errors import InfeasibleError
from autopar.plans import Plan

Solve = Callable[[int | None], Plan]
"""``solve(budget)`` returns the optimal plan whose kept bytes are within ``budget``, with its predicted peak."""

ROUNDS = 3
"""How often a larger reserve is tried: each is a problem with a tighter budget, and those take long."""


def fit_memory(solve: Solve, budget: int | None) -> Plan:
    """Return the optimal plan within the budget, less a reserve where what is alive at once would not fit otherwise.

    The solver knows what is kept: parameters, gradients, optimizer state, saved tensors. What is alive at once, with
    temporaries and gathered copies, is known when the plan is lowered. Where that is more than the budget, the solver
    gets so much less, until it fits; the plan tells the reserve. Where nothing is found, the plan within the whole
    budget comes back: its peak is beyond the budget, and its report says so.

    Args:
        solve: returns plans.
        budget: bytes a rank; None for no bound.

    Raises:
        InfeasibleError: what must be kept does not fit.
    """
    first = plan = solve(budget)
    if budget is None:
        return first
    given = budget
    for _ in range(ROUNDS):
        over = plan.memory.peak_bytes - budget
        if over <= 0:
            return _with_reserve(plan, budget - given)
        given = min(given, plan.memory.total_bytes) - over
        try:
            plan = solve(given)
        except InfeasibleError:
            return first
    return _with_reserve(plan, budget - given) if plan.memory.peak_bytes <= budget else first


def _with_reserve(plan: Plan, reserve_bytes: int) -> Plan:
    return msgspec.structs.replace(plan, memory=msgspec.structs.replace(plan.memory, reserve_bytes=reserve_bytes))
