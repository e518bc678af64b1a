"""Find the optimum of a problem and prove it: relax, leave out what can't be part of it, branch over the rest.

A relaxation whose optimum is integral is the answer. Otherwise its dual values give a lower bound and a price for
every variable; a strategy is priced by its own variable and by the cheapest ways, at those prices, of every tensor that
must then travel from or to its layouts. Strategies priced above an allowance are left out, the problem that remains is
reduced and solved exactly, and when its optimum lies within the allowance of the bound, no plan that uses what was left
out can be better: the optimum is proved. Otherwise the allowance grows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import networkx as nx
import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import dijkstra

from autopar.errors import AutoparError, ConstraintError

from .layout_graph import Floats
from .model import Flow, LinearModel, build_model
from .problem import Problem
from .reduce import reduce_problem
from .solver import INTEGRAL_TOLERANCE, LARGE, ROUGH, Answer, Relaxed, branch, dual_bound, is_integral, relax

FIRST_ALLOWANCE = 1e-4
"""Of the bound: how much dearer than it a plan of the first attempt may be."""
GROWTH = 4.0
SAME = 1e-7
"""Relative difference of a plan from the bound below which it is proved: that of the solvers' own arithmetic."""
MOST_DIVES = 60
NEARLY = 0.05
"""How far from 1 the value of a decided strategy may be where a relaxation is not exact."""
APART = 6
"""Tensors between decisions that are closed at one time."""
MOST_BRANCHED = 30_000
"""Variables from which a proof by branch and bound is given up: the best plan so far is returned with its gap."""


@dataclass(frozen=True, eq=False)
class Proved:
    """The answer, and the problem and model (a part of those asked about) whose variables it is of."""

    problem: Problem
    model: LinearModel
    answer: Answer


def solve_problem(
    problem: Problem,
    model: LinearModel,
    *,
    objective: str = "seconds",
    large: int = LARGE,
    time_limit_s: float | None = None,
) -> Proved:
    """Return the proved optimum of a reduced problem.

    Args:
        problem, model: the problem, and what ``build_model`` makes of it for ``objective``.
        objective: ``"seconds"`` or ``"bytes"``.
        large: number of variables from which PDLP relaxes it.
        time_limit_s: for each run of branch and bound; without it the answer does not depend on the machine.

    Raises:
        AutoparError: the solver failed for another reason than infeasibility or time.
    """
    begin = time.perf_counter()
    relaxed = relax(model, large=large)
    proved = _search(problem, model, relaxed, objective, time_limit_s)
    byte_s = max(0.0, -float(relaxed.duals[model.memory_row])) / model.memory_unit if model.memory_unit else 0.0
    seconds = time.perf_counter() - begin
    return replace(proved, answer=replace(proved.answer, seconds=seconds, byte_s=byte_s))


def _search(problem: Problem, model: LinearModel, relaxed: Relaxed, objective: str, limit_s: float | None) -> Proved:
    done = _as_answer(model, relaxed)
    if done is not None:
        return Proved(problem, model, done)
    bound, prices = dual_bound(model, relaxed.duals)
    if relaxed.status != "optimal" or not math.isfinite(bound) or bound <= 0:
        return _branch_all(problem, model, -math.inf, None, limit_s)
    best = _dive(problem, model, relaxed, objective, limit_s)
    if best is not None and best.answer.objective - bound <= SAME * bound:
        return replace(best, answer=replace(best.answer, bound=min(bound, best.answer.objective)))
    rows = strategy_prices(problem, model, prices)
    total = sum(map(len, rows))
    allowance = FIRST_ALLOWANCE * bound if best is None else 1.001 * (best.answer.objective - bound)
    while True:
        keep = [row <= allowance for row in rows]
        if sum(int(kept.sum()) for kept in keep) > 0.9 * total:
            return _branch_all(problem, model, bound, best, limit_s)
        part = _solve_part(problem, keep, objective, limit_s, best)
        if part.answer.status == "infeasible":
            allowance *= GROWTH
            continue
        best = _better(best, part)
        if best.answer.objective - bound <= allowance and part.answer.status == "optimal":
            return best
        if part.answer.status != "optimal":
            return _given_up(best, bound)
        allowance = 1.001 * (best.answer.objective - bound)


def _branch_all(
    problem: Problem, model: LinearModel, bound: float, best: Proved | None, limit_s: float | None
) -> Proved:
    """Return what branch and bound finds over the whole problem, or ``best`` where that is too large for it."""
    if best is not None and model.num_variables > MOST_BRANCHED:
        return _given_up(best, bound)
    found = Proved(problem, model, branch(model, time_limit_s=limit_s))
    if found.answer.status in ("optimal", "infeasible"):
        return found
    return _given_up(_better(best, found), max(bound, found.answer.bound))


def _better(best: Proved | None, found: Proved) -> Proved:
    return found if best is None or found.answer.objective <= best.answer.objective else best


def _given_up(best: Proved, bound: float) -> Proved:
    """Return a plan whose proof is given up, with the bound that is known.

    Raises:
        AutoparError: there is no plan.
    """
    if not len(best.answer.values):
        raise AutoparError(
            f"no plan was found within the limits of branch and bound, on {best.model.num_variables} variables; "
            "give more memory, take a smaller mesh, or fix some choices with constraints"
        )
    return replace(best, answer=replace(best.answer, status="feasible", bound=bound))


def _dive(
    problem: Problem, model: LinearModel, relaxed: Relaxed, objective: str, limit_s: float | None
) -> Proved | None:
    """Return some integral plan near the relaxation: what is decided stays, open decisions are closed.

    A relaxation is fractional without a gap where axes are alike: it mixes plans that mirror one another. Closing one
    decision then decides those around it; so they are closed one by one. Of a problem that is relaxed by PDLP, where
    each step is long, twice as many at every step, apart from one another. Where all are closed and the relaxation is
    not integral, memory is short: branch and bound tells what is kept and what is had again, under these decisions.
    """
    for step in range(MOST_DIVES):
        if len(relaxed.values) != model.num_variables:
            return None
        done = _as_answer(model, relaxed)
        if done is not None:
            return Proved(problem, model, done) if done.status == "optimal" else None
        values = _of_decisions(problem, model, relaxed)
        is_open = [float(row.max()) <= 1 - (INTEGRAL_TOLERANCE if relaxed.is_exact else NEARLY) for row in values]
        keep = [np.full(len(row), True) if open_ else row >= row.max() for row, open_ in zip(values, is_open)]
        count = 1 if relaxed.is_exact else 2**step
        for index in _to_close(problem, values, is_open, count):
            keep[index] = np.arange(len(keep[index])) == int(np.argmax(values[index]))
        decided = not any(is_open) and relaxed.is_exact
        try:
            problem = reduce_problem(problem.with_rows(keep), dominate=objective == "seconds")
        except ConstraintError:
            return None
        model = build_model(problem, objective=objective)
        if decided:
            found = Proved(problem, model, branch(model, time_limit_s=limit_s))
            return found if len(found.answer.values) else None
        relaxed = relax(model, tolerance=ROUGH)
    return None


def _of_decisions(problem: Problem, model: LinearModel, solution: Relaxed | Answer) -> list[Floats]:
    """Return a solution's values of the strategies of every decision."""
    firsts = model.first_variable.tolist()
    return [solution.values[at : at + len(one.strategies)] for at, one in zip(firsts, problem.decisions, strict=True)]


def _to_close(problem: Problem, values: Sequence[Floats], is_open: Sequence[bool], count: int) -> list[int]:
    """Return up to ``count`` open decisions, each apart from the others: the most nearly decided, then of most work."""

    def order(index: int) -> tuple[float, float, int]:
        decision = problem.decisions[index]
        work_s = float(decision.strategies.seconds.max()) * decision.multiplicity
        return -round(float(values[index].max()), 3), -work_s, index

    waiting = sorted((index for index, open_ in enumerate(is_open) if open_), key=order)
    if count == 1:
        return waiting[:1]
    touching = nx.Graph()
    touching.add_nodes_from(waiting)
    for network in problem.networks:
        readers = (*network.readers, *network.late_readers, *network.again_readers)
        nx.add_star(touching, (network.producer, *(reader.decision for reader in readers)))
    chosen: list[int] = []
    near: set[int] = set()
    for index in waiting:
        if index not in near and len(chosen) < count:
            chosen.append(index)
            near |= nx.single_source_shortest_path_length(touching, index, APART).keys()
    return chosen


def _solve_part(
    problem: Problem, keep: list[np.ndarray], objective: str, limit_s: float | None, best: Proved | None
) -> Proved:
    """Solve the problem with some strategies only; ``unknown`` when that is too large although a plan is known."""
    nothing = Answer("infeasible", np.zeros(0), math.inf, math.inf)
    if not all(kept.any() for kept in keep):
        return Proved(problem, build_model(problem, objective=objective), nothing)
    try:
        part = reduce_problem(problem.with_rows(keep), dominate=objective == "seconds")
    except ConstraintError:
        return Proved(problem, build_model(problem, objective=objective), nothing)
    model = build_model(part, objective=objective)
    answer = _as_answer(model, relax(model))
    if answer is None:
        if best is not None and model.num_variables > MOST_BRANCHED:
            return Proved(part, model, Answer("unknown", np.zeros(0), math.inf, -math.inf))
        answer = branch(model, time_limit_s=limit_s)
    return Proved(part, model, answer)


def _as_answer(model: LinearModel, relaxed: Relaxed) -> Answer | None:
    """Return the answer if the relaxation leaves nothing to branch on: it is integral, or there is no solution."""
    if relaxed.status == "infeasible":
        return Answer("infeasible", np.zeros(0), math.inf, math.inf)
    if relaxed.status == "optimal" and relaxed.is_exact and is_integral(model, relaxed.values):
        return Answer("optimal", relaxed.values, relaxed.objective, relaxed.objective)
    return None


def strategy_prices(problem: Problem, model: LinearModel, prices: Floats) -> list[Floats]:
    """Return, for every strategy of every decision, how much at least a plan with it costs above the bound.

    Args:
        problem, model: what is solved.
        prices: of every variable, not negative, as ``dual_bound`` returns them.
    """
    out = []
    for index, decision in enumerate(problem.decisions):
        first = int(model.first_variable[index])
        out.append(prices[first : first + len(decision.strategies)].copy())
    for flow in model.flows:
        if flow.optional:
            continue
        leaving, arriving = _ways(flow, prices)
        out[flow.producer] += leaving
        if flow.reader != flow.producer:
            out[flow.reader] += arriving
    return out


def _ways(flow: Flow, prices: Floats) -> tuple[Floats, Floats]:
    """Return the cheapest way from each row of the producer to any demand, and from any start to each reader's row."""
    count = int(max(flow.starts.max(), flow.demands.max(), flow.target.max(initial=0), flow.source.max(initial=0))) + 1
    weights = prices[flow.variables]
    if not weights.any():
        reach_out, reach_in = (np.zeros(shape) for shape in (flow.starts.shape[1], len(flow.demands)))
        return reach_out, reach_in
    ahead = csr_matrix((weights, (flow.source, flow.target)), shape=(count, count))
    back = csr_matrix((weights, (flow.target, flow.source)), shape=(count, count))
    arriving = dijkstra(ahead, indices=np.unique(flow.starts), min_only=True)[flow.demands]
    leaving = dijkstra(back, indices=np.unique(flow.demands), min_only=True)[flow.starts].min(axis=0)
    return leaving, arriving
