"""Decide every strategy: reduce, solve, and rebuild the answer by exact arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from autopar.errors import AutoparError, InfeasibleError
from autopar.report.text import exact_bytes

from .decide_hiding import decide_hiding
from .layout_graph import Floats
from .model import TIE_S_PER_BYTE, LinearModel, build_model
from .problem import Network, Problem
from .prove import Proved, solve_problem
from .reduce import reduce_problem
from .solver import Answer
from .travel import Travel, cheapest_travel

AGREEMENT = 1e-6
"""How far the solver's objective may lie from the exact cost of its decision, relative."""


@dataclass(frozen=True, eq=False)
class Decided:
    """A decision for every variable of a problem, with its exact cost.

    Attributes:
        rows: strategy row of every decision, in ``problem``.
        again: which decisions' ops the backward computes again.
        again_bytes: what that brings back at one time.
        travels: how every network's tensor travels.
        seconds: of a step: compute, and what travels without hiding behind it.
        hidden_seconds: what travels behind compute.
        weighted_seconds: by the weights of ``problem.hiding``: what the solver's objective counts.
        unhidden: of every group of regions, by how many seconds its compute is longer than what may hide behind it.
        num_bytes: kept on the fullest rank.
        weighed_bytes: those that the solver's model counts.
        answer: what the solver said of it.
        problem: the (reduced) problem that rows index.
        num_variables, num_rows: of the model that was solved.
    """

    problem: Problem
    rows: tuple[int, ...]
    again: tuple[bool, ...]
    again_bytes: int
    travels: tuple[Travel, ...]
    seconds: float
    hidden_seconds: float
    weighted_seconds: float
    unhidden: tuple[float, ...]
    num_bytes: int
    weighed_bytes: float
    answer: Answer
    num_variables: int
    num_rows: int


Clock = Callable[[str, Callable[[], Any]], Any]
"""``clock(phase, work)`` returns what ``work()`` does, perhaps timed; phases are ``reduce``, ``build``, ``solve``."""


def decide(
    problem: Problem,
    *,
    dominate: bool = True,
    time_limit_s: float | None = None,
    clock: Clock | None = None,
    quick: bool = False,
) -> Decided:
    """Return the optimal decision.

    With a budget, the problem without one is solved first: it is far easier, and its optimum may fit.

    Args:
        problem: what to decide; its ``budget`` bounds the bytes.
        dominate: take out dominated strategies first (never changes the optimum).
        time_limit_s: for the solver.
        clock: runs each phase.
        quick: where regions hide communication, give up what can't be proved at little cost: ``feasible``.

    Raises:
        InfeasibleError: no decision fits the budget; it names the least one that does.
        AutoparError: the solver's objective is not the cost of its decision.
    """
    decided = None
    solve = partial(_solve, dominate=dominate, time_limit_s=time_limit_s, clock=clock or _at_once)
    for attempt in attempts(problem):
        decided = decide_hiding(attempt, solve, quick=quick)
        if problem.budget is None or decided.num_bytes <= problem.budget:
            break
    assert decided is not None
    return decided


def _solve(
    problem: Problem,
    *,
    dominate: bool,
    time_limit_s: float | None,
    clock: Clock,
) -> Decided:
    reduced = clock("reduce", lambda: reduce_problem(problem, dominate=dominate))
    model = clock("build", lambda: build_model(reduced))
    decided: Decided = clock("solve", lambda: solve_reduced(reduced, model, time_limit_s=time_limit_s))
    return decided


def _at_once(phase: str, work: Callable[[], Any]) -> Any:
    return work()


def attempts(problem: Problem) -> tuple[Problem, ...]:
    """Return what to solve, one after the other until a decision fits the budget: first without one, then with it."""
    return (problem,) if problem.budget is None else (problem.without_budget(), problem)


def solve_reduced(problem: Problem, model: LinearModel, *, time_limit_s: float | None = None) -> Decided:
    """Return the optimal decision of a reduced problem by its model; raises as ``decide`` does."""
    proved = solve_problem(problem, model, time_limit_s=time_limit_s)
    if proved.answer.status == "infeasible":
        raise _too_small(problem)
    decided = rebuild(proved, model)
    if problem.budget is not None and decided.num_bytes > problem.budget:
        decided = _tighten(problem, decided, time_limit_s)
    priced = decided.weighted_seconds + TIE_S_PER_BYTE * decided.weighed_bytes
    gap = abs(priced - decided.answer.objective)
    if gap > AGREEMENT * max(abs(decided.answer.objective), 1e-12) and decided.answer.status == "optimal":
        raise AutoparError(
            f"the solver reports {decided.answer.objective:.9g} s, but its decision costs {priced:.9g} s: "
            f"the model and the arithmetic disagree; please report the model and the mesh {problem.prices.mesh}"
        )
    return decided


def rebuild(proved: Proved, asked: LinearModel) -> Decided:
    """Return the decision that a solver's answer stands for, priced by exact arithmetic.

    Args:
        proved: the answer, with its problem and model.
        asked: the model that it is an answer to, for its size.
    """
    problem, model, answer = proved.problem, proved.model, proved.answer
    rows, again = [], []
    for index, decision in enumerate(problem.decisions):
        first, count = int(model.first_variable[index]), len(decision.strategies)
        rows.append(int(np.argmax(answer.values[first : first + count])))
        first = int(model.first_again[index])
        again.append(first >= 0 and float(answer.values[first : first + count].max()) > 0.5)
    again = _needed_again(problem, again)
    saved: dict[int, list[int]] = {}
    for (number, node), variable in model.saves.items():
        if answer.values[variable] > 0.5:
            saved.setdefault(number, []).append(node)
    travels = tuple(
        _travel(problem, network, rows, again, saved.get(number, [])) for number, network in enumerate(problem.networks)
    )
    seconds, num_bytes = 0.0, problem.fixed_bytes
    for decision, row, repeated in zip(problem.decisions, rows, again, strict=True):
        chosen = decision.strategies
        seconds += float(chosen.seconds[row]) * decision.multiplicity * (2 if repeated else 1)
        num_bytes += (int(chosen.bytes[row]) + (decision.again_bytes if repeated else 0)) * decision.multiplicity
    for network, travel in zip(problem.networks, travels, strict=True):
        seconds += travel.seconds * network.multiplicity
        num_bytes += travel.saved_bytes(network.graph) * network.multiplicity
    computed, moved = _by_group(problem, rows, again, travels)
    hidden = float(np.minimum(computed, moved).sum())
    weights = np.array(problem.hiding.weights)
    weighted = float(((1 - weights) * computed + weights * moved).sum()) if len(weights) else hidden
    back = max((_bytes_back(problem, segment, rows, again) for segment in problem.segments), default=0)
    return Decided(
        problem,
        tuple(rows),
        tuple(again),
        back,
        travels,
        seconds - hidden,
        hidden,
        seconds - weighted,
        tuple((computed - moved).tolist()),
        num_bytes + back,
        float(model.memory_bytes @ answer.values),
        answer,
        asked.num_variables,
        asked.num_rows,
    )


def _needed_again(problem: Problem, again: list[bool]) -> list[bool]:
    """Leave out what is computed again for nobody: a tie that costs nothing."""
    readers: dict[int, list[tuple[int, bool]]] = {}
    for network in problem.networks:
        found = readers.setdefault(network.producer, [])
        found += [(reader.decision, True) for reader in network.late_readers]
        found += [(reader.decision, False) for reader in network.again_readers]
    again = list(again)
    changed = True
    while changed:
        changed = False
        for index, repeated in enumerate(again):
            if repeated and not any(late or again[reader] for reader, late in readers.get(index, [])):
                again[index] = False
                changed = True
    return again


def _by_group(
    problem: Problem, rows: list[int], again: list[bool], travels: tuple[Travel, ...]
) -> tuple[Floats, Floats]:
    """Return, for every group of regions, the seconds of its compute and of what may hide behind it."""
    hiding = problem.hiding
    computed, moved = np.zeros(hiding.num_groups), np.zeros(hiding.num_groups)
    for decision, row, repeated, parts in zip(problem.decisions, rows, again, hiding.decisions):
        for group, count in parts:
            computed[group] += float(decision.strategies.seconds[row]) * count * (2 if repeated else 1)
    for travel, parts in zip(travels, hiding.networks):
        for group, count in parts:
            moved[group] += travel.seconds * count * hiding.hidden_share
    return computed, moved


def _bytes_back(problem: Problem, segment: tuple[tuple[int, int], ...], rows: list[int], again: list[bool]) -> int:
    return sum(
        int(problem.decisions[index].strategies.result_bytes[rows[index]]) * count
        for index, count in segment
        if again[index]
    )


def _travel(problem: Problem, network: Network, rows: list[int], again: list[bool], saved: list[int]) -> Travel:
    source = int(problem.sources(network)[rows[network.producer]])
    late_readers = (*network.late_readers, *(r for r in network.again_readers if again[r.decision]))
    early, late = (
        sorted({int(problem.demands(network, reader)[rows[reader.decision]]) for reader in readers})
        for readers in (network.readers, late_readers)
    )
    return cheapest_travel(
        network.graph,
        source,
        early,
        late,
        saved if problem.budget is not None else None,
        resting=network.resting,
        again=again[network.producer],
    )


def least_bytes(problem: Problem) -> int:
    """Return the smallest budget that has a plan; where its proof is given up, the smallest that is known to.

    Raises:
        AutoparError: no plan is known.
    """
    reduced = drop_for_bytes(problem)
    model = build_model(reduced, objective="bytes")
    proved = solve_problem(reduced, model, objective="bytes")
    if proved.answer.status not in ("optimal", "feasible"):
        raise AutoparError(f"the least memory could not be found: the solver says {proved.answer.status}")
    return rebuild(proved, model).num_bytes


def drop_for_bytes(problem: Problem) -> Problem:
    """Return the problem without impossible strategies; dominance looks at seconds, so it is left alone here."""
    return reduce_problem(problem, dominate=False)


def _too_small(problem: Problem) -> InfeasibleError:
    least = least_bytes(problem)
    assert problem.budget is not None
    return InfeasibleError(
        f"no plan fits into {exact_bytes(problem.budget)} a rank on {problem.prices.mesh}; the least known to have one "
        f"is {exact_bytes(least)}: raise memory= to that, use more ranks, or another optimizer",
        least,
    )


def _tighten(problem: Problem, decided: Decided, time_limit_s: float | None) -> Decided:
    """Solve again with a budget lower by what the solver's tolerance let through."""
    assert problem.budget is not None
    budget = problem.budget
    for _ in range(8):
        budget -= decided.num_bytes - problem.budget
        lower = replace(problem, budget=budget)
        model = build_model(lower)
        proved = solve_problem(lower, model, time_limit_s=time_limit_s)
        if proved.answer.status == "infeasible":
            break
        decided = rebuild(proved, model)
        if decided.num_bytes <= problem.budget:
            return decided
    raise _too_small(problem)
