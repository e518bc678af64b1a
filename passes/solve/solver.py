"""Solvers inside OR-Tools: hand the arrays over, read the answer, prove it.

The relaxation is solved by HiGHS's simplex, that of a large model by PDLP (Applegate et al., NeurIPS 2021). Where it
is not an integral vertex, its dual solution gives a bound that is computed here, by arithmetic, and a price for every
variable. Variables whose price lifts the bound above ``bound + allowance`` are left out, the small rest is solved
exactly, and when its optimum lies within the allowance no plan that uses what was left out can be better: the optimum
is proved.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from ortools.linear_solver.python import model_builder_helper
from scipy.sparse import csr_matrix, diags

from autopar.errors import AutoparError

from .layout_graph import Bools, Floats
from .model import LinearModel

INTEGRAL_TOLERANCE = 1e-6
LARGE = 60_000
"""Variables from which a model is relaxed by PDLP first."""
SMALL = 3_000
"""Variables up to which branch and bound gets the whole model."""
MOST_BRANCHED = 20_000
"""Variables from which a proof by branch and bound is given up: the best plan so far is returned with its gap."""

_HIGHS = "log_to_console = false\noutput_flag = false\nthreads = 1\nrandom_seed = 0\n"
_SIMPLEX = "solver = simplex\n"
_PDLP = (
    "verbosity_level: 0 num_threads: 1 termination_criteria { iteration_limit: 40000 "
    "simple_optimality_criteria { eps_optimal_relative: 1e-7 eps_optimal_absolute: 1e-7 } }"
)
_STATUS = model_builder_helper.SolveStatus


@dataclass(frozen=True, eq=False)
class Answer:
    """What the solver said.

    Attributes:
        status: ``"optimal"`` (proved), ``"feasible"`` (time ran out) or ``"infeasible"``.
        values: of every variable; empty when infeasible.
        objective, bound: of the model; seconds or scaled bytes.
        seconds: wall time.
    """

    status: str
    values: Floats
    objective: float
    bound: float
    seconds: float = 0.0


def solve_model(model: LinearModel, *, large: int = LARGE, time_limit_s: float | None = None) -> Answer:
    """Return the proved optimum of a model.

    Args:
        model: the arrays.
        large: number of variables from which PDLP relaxes it first.
        time_limit_s: for each run of branch and bound; without it the answer does not depend on the machine.

    Raises:
        AutoparError: the solver failed for another reason than infeasibility or time.
    """
    begin = time.perf_counter()
    relaxed = None if model.num_variables >= large else _relax(model, time_limit_s)
    if relaxed is not None and _is_answer(model, relaxed):
        return replace(relaxed, seconds=time.perf_counter() - begin)
    answer = None
    if model.num_variables >= SMALL:
        _, duals = _run(model, "pdlp", _PDLP, rhs_limit=16.0)
        answer = _solve_by_bound(model, duals, time_limit_s)
    if answer is None:
        answer = _solve_whole(model, time_limit_s, relaxed)
    return replace(answer, seconds=time.perf_counter() - begin)


def _solve_whole(model: LinearModel, time_limit_s: float | None, relaxed: Answer | None = None) -> Answer:
    """Relax (unless ``relaxed`` is given), and branch where that does not answer."""
    relaxed = relaxed or _relax(model, time_limit_s)
    if _is_answer(model, relaxed):
        return relaxed
    return _run(model, "scip", "", integral=True, time_limit_s=time_limit_s)[0]


def _relax(model: LinearModel, time_limit_s: float | None) -> Answer:
    return _run(model, "highs", _HIGHS + _SIMPLEX, time_limit_s=time_limit_s)[0]


def _is_answer(model: LinearModel, relaxed: Answer) -> bool:
    """Tell whether a relaxation leaves nothing to branch on: it is integral, or there is no optimum."""
    return relaxed.status != "optimal" or _is_integral(model, relaxed.values)


def _is_integral(model: LinearModel, values: Floats) -> bool:
    decided = values[model.integral]
    return float(np.abs(decided - np.round(decided)).max(initial=0.0)) <= INTEGRAL_TOLERANCE


def _solve_by_bound(model: LinearModel, duals: Floats, time_limit_s: float | None) -> Answer | None:
    """Solve what the relaxation's dual prices leave; None when they bound nothing useful."""
    if len(duals) != model.num_rows:
        return None
    bound, prices = dual_bound(model, duals)
    if not math.isfinite(bound) or bound <= 0:
        return None
    allowance = 1e-4 * bound
    best: Answer | None = None
    for _ in range(12):
        kept = prices <= allowance
        if best is not None and kept.sum() > MOST_BRANCHED:
            return replace(best, status="feasible", bound=bound)
        if kept.sum() > 0.8 * model.num_variables:
            return None
        answer = _solve_whole(_restricted(model, kept), time_limit_s)
        if answer.status == "infeasible":
            allowance *= 4
            continue
        values = np.zeros(model.num_variables)
        values[kept] = answer.values
        best = replace(answer, values=values)
        if answer.objective - bound <= allowance:
            return best
        enough = 1.001 * (answer.objective - bound)
        direct = (prices <= enough).sum() <= MOST_BRANCHED // 2
        allowance = enough if direct else min(16 * allowance, enough)
    return None


def dual_bound(model: LinearModel, duals: Floats) -> tuple[float, Floats]:
    """Return a lower bound on the optimum and the price of every variable, from any dual values.

    Every variable of some optimal plan is 0 or 1 (flows too: one unit each, on integral networks), so for any ``y`` of
    the right signs ``y b + sum of min(0, price)`` is a bound, ``price = cost - y A``; a plan that uses a variable
    costs at least its price more.
    """
    duals = np.where((duals > 0) & ~np.isfinite(model.row_lower), 0.0, duals)
    duals = np.where((duals < 0) & ~np.isfinite(model.row_upper), 0.0, duals)
    sides = np.where(duals > 0, model.row_lower, model.row_upper)
    prices = model.cost - model.matrix.T @ duals
    used = duals != 0
    return float(duals[used] @ sides[used] + np.minimum(prices, 0.0).sum()), np.maximum(prices, 0.0)


def _restricted(model: LinearModel, kept: Bools) -> LinearModel:
    """Return the model in which all other variables are 0, without the rows that this leaves empty."""
    matrix = model.matrix[:, np.flatnonzero(kept)]
    full = np.diff(matrix.indptr) > 0
    full |= (model.row_lower > 0) | (model.row_upper < 0)
    rows = np.flatnonzero(full)
    return replace(
        model,
        cost=model.cost[kept],
        upper=model.upper[kept],
        integral=model.integral[kept],
        matrix=csr_matrix(matrix[rows]),
        row_lower=model.row_lower[rows],
        row_upper=model.row_upper[rows],
    )


def _cost_scale(model: LinearModel) -> float:
    """Return the factor that brings the largest cost to about 1000: the solvers' tolerances are absolute."""
    largest = float(np.abs(model.cost).max(initial=0.0))
    return 1.0 if largest == 0.0 else float(2.0 ** np.round(np.log2(1000.0 / largest)))


def _row_scales(model: LinearModel, limit: float) -> Floats:
    """Return powers of two that bring every finite side of a row below ``limit``."""
    sides = np.maximum(
        np.where(np.isfinite(model.row_lower), np.abs(model.row_lower), 0.0),
        np.where(np.isfinite(model.row_upper), np.abs(model.row_upper), 0.0),
    )
    return np.exp2(-np.ceil(np.log2(np.maximum(sides / limit, 1.0))))


def _run(
    model: LinearModel,
    solver_name: str,
    parameters: str,
    *,
    integral: bool = False,
    time_limit_s: float | None = None,
    rhs_limit: float = 2.0**20,
) -> tuple[Answer, Floats]:
    """Run one solver; return its answer and the dual values of the rows (empty after branch and bound)."""
    scale, row_scales = _cost_scale(model), _row_scales(model, rhs_limit)
    helper: Any = model_builder_helper.ModelBuilderHelper()
    helper.fill_model_from_sparse_data(
        np.zeros(model.num_variables),
        model.upper,
        model.cost * scale,
        model.row_lower * row_scales,
        model.row_upper * row_scales,
        csr_matrix(diags(row_scales) @ model.matrix),
    )
    if integral:
        for index in np.flatnonzero(model.integral).tolist():
            helper.set_var_integrality(index, True)
    solver = model_builder_helper.ModelSolverHelper(solver_name)
    solver.enable_output(False)
    solver.set_solver_specific_parameters(parameters)
    if time_limit_s is not None:
        solver.set_time_limit_in_seconds(time_limit_s)
    solver.solve(helper)
    status = solver.status()
    if status == _STATUS.INFEASIBLE or (status == _STATUS.INVALID_SOLVER_PARAMETERS and not model.num_variables):
        return Answer("infeasible", np.zeros(0), math.inf, math.inf), np.zeros(0)
    if solver_name == "pdlp" and status not in (_STATUS.OPTIMAL, _STATUS.FEASIBLE):
        return Answer("unknown", np.zeros(0), math.inf, -math.inf), np.zeros(0)
    if status not in (_STATUS.OPTIMAL, _STATUS.FEASIBLE):
        raise AutoparError(
            f"the solver stopped with {status.name} on {model.num_variables} variables and {model.num_rows} rows "
            f"({solver.status_string()}): give it more time or a smaller mesh"
        )
    objective = float(solver.objective_value()) / scale
    bound = float(solver.best_objective_bound()) / scale if integral else objective
    duals = np.zeros(0) if integral else np.asarray(solver.dual_values()) * row_scales / scale
    proved = "optimal" if status == _STATUS.OPTIMAL else "feasible"
    return Answer(proved, np.asarray(solver.variable_values()), objective, min(bound, objective)), duals
