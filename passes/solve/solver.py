"""The solvers: HiGHS and PDLP relax, SCIP branches; bounds are computed from dual values by arithmetic of our own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from ortools.linear_solver.python import model_builder_helper
from scipy.optimize import linprog
from scipy.sparse import csr_matrix, diags, vstack

from autopar.errors import AutoparError

from .layout_graph import Floats
from .model import LinearModel

INTEGRAL_TOLERANCE = 1e-6
LARGE = 150_000
"""Variables from which a model is relaxed by PDLP."""
NODE_VARIABLES = 20_000_000
"""Nodes of the tree times variables after which branch and bound is given up: a limit that no machine changes."""
_PDLP = (
    "verbosity_level: 0 num_threads: 1 termination_criteria {{ iteration_limit: 40000 "
    "simple_optimality_criteria {{ eps_optimal_relative: {0} eps_optimal_absolute: {0} }} }}"
)
FINE, ROUGH = 1e-7, 1e-4
"""Relative tolerance of PDLP: for a bound that proves, and for values that only show the way to a plan."""
_STATUS = model_builder_helper.SolveStatus


@dataclass(frozen=True, eq=False)
class Answer:
    """What the solver said.

    Attributes:
        status: ``"optimal"`` (proved), ``"feasible"`` (given up with a plan), ``"unknown"`` (given up without one) or
            ``"infeasible"``.
        values: of every variable; empty when infeasible.
        objective, bound: of the model; seconds or scaled bytes.
        seconds: wall time.
        byte_s: seconds that one more byte of budget can save, by the relaxation's price of memory.
    """

    status: str
    values: Floats
    objective: float
    bound: float
    seconds: float = 0.0
    byte_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Relaxed:
    """A relaxation's answer.

    Attributes:
        status: ``"optimal"``, ``"infeasible"`` or ``"unknown"`` (no answer within the solver's limits).
        values: of every variable; empty without an optimum.
        objective: of the relaxation.
        duals: one a row.
        is_exact: whether the values are those of a vertex, so that integral ones are a plan; if not, they are near the
            optimum, and only the bound that the dual values give can be built upon.
    """

    status: str
    values: Floats
    objective: float
    duals: Floats
    is_exact: bool = True


def relax(model: LinearModel, *, large: int = LARGE, tolerance: float = FINE) -> Relaxed:
    """Return the relaxation's optimum: by simplex, or from ``large`` variables on by PDLP, which is not exact.

    PDLP is the primal-dual hybrid gradient method of Applegate et al. (NeurIPS 2021).
    """
    if model.num_variables >= large:
        answer, duals = _run(model, "pdlp", _PDLP.format(tolerance), rhs_limit=16.0)
        if len(duals) == model.num_rows:
            return Relaxed("optimal", answer.values, answer.objective, duals, is_exact=False)
        return Relaxed("unknown", np.zeros(0), -math.inf, np.zeros(model.num_rows))
    return _simplex(model)


def _simplex(model: LinearModel) -> Relaxed:
    scale = _cost_scale(model)
    equal = model.row_lower == model.row_upper
    fixed, bounded = np.flatnonzero(equal), np.flatnonzero(~equal)
    below, above = (np.flatnonzero(~equal & np.isfinite(side)) for side in (model.row_lower, model.row_upper))
    sides = [model.matrix[above], -model.matrix[below]]
    result = linprog(
        model.cost * scale,
        A_ub=vstack(sides) if len(bounded) else None,
        b_ub=np.concatenate([model.row_upper[above], -model.row_lower[below]]) if len(bounded) else None,
        A_eq=model.matrix[fixed] if len(fixed) else None,
        b_eq=model.row_upper[fixed] if len(fixed) else None,
        bounds=np.stack([np.zeros(model.num_variables), model.upper], axis=1),
        method="highs-ds",
    )
    none = np.zeros(model.num_rows)
    if result.status == 2:
        return Relaxed("infeasible", np.zeros(0), math.inf, none)
    if result.status != 0:
        return Relaxed("unknown", np.zeros(0), -math.inf, none)
    duals = none.copy()
    if len(fixed):
        duals[fixed] = result.eqlin.marginals / scale
    if len(bounded):
        marginals = result.ineqlin.marginals / scale
        duals[above] += marginals[: len(above)]
        duals[below] -= marginals[len(above) :]
    return Relaxed("optimal", np.asarray(result.x), float(result.fun) / scale, duals)


def is_integral(model: LinearModel, values: Floats) -> bool:
    """Tell whether a relaxation's values leave nothing to branch on."""
    if len(values) != model.num_variables:
        return False
    decided = values[model.integral]
    return float(np.abs(decided - np.round(decided)).max(initial=0.0)) <= INTEGRAL_TOLERANCE


def branch(model: LinearModel, *, time_limit_s: float | None = None) -> Answer:
    """Return the optimum by branch and bound, or the best plan found within ``NODE_VARIABLES``.

    Raises:
        AutoparError: the solver failed for another reason than infeasibility, size or time.
    """
    nodes = f"limits/totalnodes = {max(1, NODE_VARIABLES // max(1, model.num_variables))}"
    return _run(model, "scip", nodes, integral=True, time_limit_s=time_limit_s)[0]


def dual_bound(model: LinearModel, duals: Floats) -> tuple[float, Floats]:
    """Return a lower bound on the optimum and the price of every variable, from any dual values.

    Every variable of some optimal plan lies between 0 and its bound, where flows have 1 (one unit each, on integral
    networks), so for any ``y`` of the right signs ``y b + sum of min(0, price) bound`` is a bound,
    ``price = cost - y A``; a plan that uses a choice costs at least its price more.
    """
    duals = np.where((duals > 0) & ~np.isfinite(model.row_lower), 0.0, duals)
    duals = np.where((duals < 0) & ~np.isfinite(model.row_upper), 0.0, duals)
    sides = np.where(duals > 0, model.row_lower, model.row_upper)
    prices = model.cost - model.matrix.T @ duals
    used = duals != 0
    most = np.where(np.isfinite(model.upper), model.upper, 1.0)
    return float(duals[used] @ sides[used] + np.minimum(prices, 0.0) @ most), np.maximum(prices, 0.0)


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
    given_up = status == _STATUS.NOT_SOLVED if integral else status not in (_STATUS.OPTIMAL, _STATUS.FEASIBLE)
    if given_up:
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
