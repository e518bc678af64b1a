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


def fit_memory(solve: Solve, budget: int) -> Plan:
    """Return the optimal plan within the budget, less a reserve where what is alive at once would not fit otherwise.

    The solver knows what is kept: parameters, gradients, optimizer state, saved tensors. What is alive at once, with
    temporaries and gathered copies, is known when the plan is lowered. Where that is more than the budget, the solver
    gets so much less, until it fits; the plan tells the reserve. A larger budget may then give a slower plan: another
    reserve.

    Args:
        solve: returns plans.
        budget: bytes a rank.

    Raises:
        InfeasibleError: no plan was found that fits; it names a budget that has one.
    """
    try:
        plan = solve(budget)
        given = budget
        for _ in range(ROUNDS):
            if plan.memory.peak_bytes <= budget:
                return _with_reserve(plan, budget - given)
            given = min(given, plan.memory.total_bytes) - (plan.memory.peak_bytes - budget)
            plan = solve(given)
        if plan.memory.peak_bytes > budget:
            plan = solve(given := 0)  # refused, with the least that can be kept
    except InfeasibleError as error:
        if error.least_bytes is None:
            raise
        given = error.least_bytes
        plan = solve(given)
    if needed_bytes(plan) <= budget:
        return _with_reserve(plan, budget - given)
    need, memory = needed_bytes(plan), plan.memory
    raise InfeasibleError(
        f"no plan was found that fits into {budget} bytes a rank at once on {plan.mesh}; with {need} there is one "
        f"({memory.total_bytes} are kept; at most {memory.peak_bytes} are alive at once, at {memory.peak_at}): "
        "raise memory= to that, use more ranks, or another optimizer",
        need,
    )


def needed_bytes(plan: Plan) -> int:
    """Return the least budget that a plan fits: what is kept, or what is alive at once."""
    return max(plan.memory.total_bytes, plan.memory.peak_bytes)


def _with_reserve(plan: Plan, reserve_bytes: int) -> Plan:
    return msgspec.structs.replace(plan, memory=msgspec.structs.replace(plan.memory, reserve_bytes=reserve_bytes))
