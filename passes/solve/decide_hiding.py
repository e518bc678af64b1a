"""Decide where regions hide communication: by weights of compute against what hides, or else by the maximum itself.

``max(compute, hideable)`` is the greatest of all ``weight compute + (1 - weight) hideable``. With fixed weights the
problem is an ordinary one, easier than that with the maximum, and its optimum is a bound for every plan (Lagrangian
duality: Geoffrion, Math. Programming Study 2 (1974) 82). Where each region is bound by what its weight says, the
bound is the cost of the plan, which is proved; else the weights of the regions that are not move.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from .problem import Problem

if TYPE_CHECKING:
    from .decide import Decided

ROUNDS = 4
LEAST = 1e-5
"""The weight of compute where transfers bind: not 0, so that no plan computes more than it must."""
PROVED = 1e-6
"""Relative difference from the bound below which a plan is proved."""
MOST_EXACT, QUICK_EXACT = 60_000, 20_000
"""Variables up to which the maximum itself is solved for where no weights prove a plan; fewer if it shall be quick."""
FEW = 5_000
"""The same where the gap is wider than this:"""
SMALL_GAP = 1e-3
"""A wider one means plans that balance compute and transfers, too many to branch over."""
QUICK, QUICK_WITHIN = 60_000, 10_000
"""Variables from which only the first weights are tried if it shall be quick; fewer within a budget, which is slow."""


def decide_hiding(problem: Problem, solve: Callable[[Problem], Decided], *, quick: bool = False) -> Decided:
    """Return the best decision of a problem in which regions may hide communication.

    Args:
        problem: with ``hiding`` as it is found: without weights.
        solve: decides a problem by its weights, or by the maximum where it has none.
        quick: give up what can't be proved at little cost.
    """
    hiding = problem.hiding
    if not hiding.num_groups:
        return solve(problem)
    low, high = [0.0] * hiding.num_groups, [1.0] * hiding.num_groups
    weights = [1.0] * hiding.num_groups
    best: Decided | None = None
    bound = 0.0
    for attempt in range(ROUNDS):
        found = solve(replace(problem, hiding=replace(hiding, weights=tuple(weights))))
        bound = max(bound, found.answer.bound)
        if best is None or found.seconds < best.seconds:
            best = found
        if best.seconds - bound <= PROVED * best.seconds or (attempt and found.answer.status != "optimal"):
            return _with_bound(best, bound)
        if quick and found.num_variables > (QUICK if problem.budget is None else QUICK_WITHIN):
            return _with_bound(best, bound)
        before = list(weights)
        for group, more in enumerate(found.unhidden):
            if more < 0:
                high[group] = min(high[group], weights[group])
            else:
                low[group] = max(low[group], weights[group])
            if more < 0 and low[group] == 0.0:
                weights[group] = LEAST
            elif low[group] < high[group]:
                weights[group] = (low[group] + high[group]) / 2
        if weights == before:
            break
    assert best is not None
    close = best.seconds - bound <= SMALL_GAP * best.seconds
    most = QUICK_EXACT if quick else MOST_EXACT
    if best.num_variables <= (most if close else FEW):
        exact = solve(problem)
        bound = max(bound, exact.answer.bound)
        best = exact if exact.seconds < best.seconds else best
    return _with_bound(best, bound)


def _with_bound(decided: Decided, bound: float) -> Decided:
    proved = decided.seconds - bound <= PROVED * decided.seconds
    status = "optimal" if proved else "feasible"
    answer = replace(decided.answer, status=status, objective=decided.seconds, bound=min(bound, decided.seconds))
    return replace(decided, answer=answer)
