"""Decide every strategy: reduce, solve, and rebuild the answer by exact arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.errors import AutoparError, InfeasibleError
from autopar.report.text import exact_bytes

from .model import LinearModel, build_model
from .problem import Network, Problem
from .reduce import reduce_problem
from .solver import Answer, solve_model
from .travel import Travel, cheapest_travel

AGREEMENT = 1e-6
"""How far the solver's objective may lie from the exact cost of its decision, relative."""


@dataclass(frozen=True, eq=False)
class Decided:
    """A decision for every variable of a problem, with its exact cost.

    Attributes:
        rows: strategy row of every decision, in ``problem``.
        travels: how every network's tensor travels.
        seconds: compute and travel together.
        num_bytes: kept on the fullest rank.
        answer: what the solver said of it.
        problem: the (reduced) problem that rows index.
        num_variables, num_rows: of the model that was solved.
    """

    problem: Problem
    rows: tuple[int, ...]
    travels: tuple[Travel, ...]
    seconds: float
    num_bytes: int
    answer: Answer
    num_variables: int
    num_rows: int


def decide(problem: Problem, *, dominate: bool = True, time_limit_s: float | None = None) -> Decided:
    """Return the optimal decision.

    Args:
        problem: what to decide; its ``budget`` bounds the bytes.
        dominate: take out dominated strategies first (never changes the optimum).
        time_limit_s: for the solver.

    Raises:
        InfeasibleError: no decision fits the budget; it names the least one that does.
        AutoparError: the solver's objective is not the cost of its decision.
    """
    reduced = reduce_problem(problem, dominate=dominate)
    return solve_reduced(reduced, build_model(reduced), time_limit_s=time_limit_s)


def solve_reduced(problem: Problem, model: LinearModel, *, time_limit_s: float | None = None) -> Decided:
    """Return the optimal decision of a reduced problem by its model; raises as ``decide`` does."""
    answer = solve_model(model, time_limit_s=time_limit_s)
    if answer.status == "infeasible":
        raise _too_small(problem)
    decided = rebuild(problem, model, answer)
    if problem.budget is not None and decided.num_bytes > problem.budget:
        decided = _tighten(problem, decided, time_limit_s)
    gap = abs(decided.seconds - decided.answer.objective)
    if gap > AGREEMENT * max(abs(decided.answer.objective), 1e-12) and answer.status == "optimal":
        raise AutoparError(
            f"the solver reports {decided.answer.objective:.9g} s, but its decision costs {decided.seconds:.9g} s: "
            f"the model and the arithmetic disagree; please report the model and the mesh {problem.prices.mesh}"
        )
    return decided


def rebuild(problem: Problem, model: LinearModel, answer: Answer) -> Decided:
    """Return the decision that a solver's answer stands for, priced by exact arithmetic."""
    rows = []
    for index, decision in enumerate(problem.decisions):
        first = int(model.first_variable[index])
        rows.append(int(np.argmax(answer.values[first : first + len(decision.strategies)])))
    saved: dict[int, list[int]] = {}
    for (number, node), variable in model.saves.items():
        if answer.values[variable] > 0.5:
            saved.setdefault(number, []).append(node)
    travels = tuple(
        _travel(problem, network, rows, saved.get(number)) for number, network in enumerate(problem.networks)
    )
    seconds = sum(
        float(decision.strategies.seconds[row]) * decision.multiplicity
        for decision, row in zip(problem.decisions, rows, strict=True)
    )
    seconds += sum(
        travel.seconds * network.multiplicity for network, travel in zip(problem.networks, travels, strict=True)
    )
    num_bytes = problem.fixed_bytes + sum(
        int(decision.strategies.bytes[row]) * decision.multiplicity
        for decision, row in zip(problem.decisions, rows, strict=True)
    )
    num_bytes += sum(
        travel.saved_bytes(network.graph) * network.multiplicity
        for network, travel in zip(problem.networks, travels, strict=True)
    )
    return Decided(problem, tuple(rows), travels, seconds, num_bytes, answer, model.num_variables, model.num_rows)


def _travel(problem: Problem, network: Network, rows: list[int], saved: list[int] | None) -> Travel:
    source = int(problem.sources(network)[rows[network.producer]])
    early, late = (
        sorted({int(problem.demands(network, reader)[rows[reader.decision]]) for reader in readers})
        for readers in (network.readers, network.late_readers)
    )
    return cheapest_travel(network.graph, source, early, late, saved if problem.budget is not None else None)


def least_bytes(problem: Problem) -> int:
    """Return the smallest budget that has a plan."""
    model = build_model(drop_for_bytes(problem), objective="bytes")
    answer = solve_model(model)
    if answer.status != "optimal":
        raise AutoparError(f"the least memory could not be found: the solver says {answer.status}")
    weighed = np.flatnonzero(model.memory_bytes)
    chosen = weighed[answer.values[weighed] > 0.5]
    return problem.fixed_bytes + int(model.memory_bytes[chosen].sum())


def drop_for_bytes(problem: Problem) -> Problem:
    """Return the problem without impossible strategies; dominance looks at seconds, so it is left alone here."""
    return reduce_problem(problem, dominate=False)


def _too_small(problem: Problem) -> InfeasibleError:
    least = least_bytes(problem)
    assert problem.budget is not None
    return InfeasibleError(
        f"no plan fits into {exact_bytes(problem.budget)} a rank on {problem.prices.mesh}; the least that has a plan "
        f"is {exact_bytes(least)}: raise memory= to that, use more ranks, or another optimizer",
        least,
    )


def _tighten(problem: Problem, decided: Decided, time_limit_s: float | None) -> Decided:
    """Solve again with a budget lower by what the solver's tolerance let through."""
    assert problem.budget is not None
    budget = problem.budget
    for _ in range(8):
        budget -= decided.num_bytes - problem.budget
        model = build_model(problem, budget=budget)
        answer = solve_model(model, time_limit_s=time_limit_s)
        if answer.status == "infeasible":
            break
        decided = rebuild(problem, model, answer)
        if decided.num_bytes <= problem.budget:
            return decided
    raise _too_small(problem)
