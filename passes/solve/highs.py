"""HiGHS inside OR-Tools: hand the arrays over, read the answer."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from ortools.linear_solver.python import model_builder_helper

from autopar.errors import AutoparError

from .layout_graph import Floats
from .model import LinearModel

INTEGRAL_TOLERANCE = 1e-6

_COMMON = "log_to_console = false\noutput_flag = false\nthreads = 1\nrandom_seed = 0\n"
_EXACT = "mip_rel_gap = 1e-9\nmip_abs_gap = 0\n"


@dataclass(frozen=True)
class Answer:
    """What the solver said.

    Attributes:
        status: ``"optimal"`` (proved), ``"feasible"`` (time ran out) or ``"infeasible"``.
        values: of every variable; empty when infeasible.
        objective, bound: of the model; seconds or scaled bytes.
        relaxed: the linear relaxation was integral, so no branching was needed.
        seconds: wall time.
    """

    status: str
    values: Floats
    objective: float
    bound: float
    relaxed: bool
    seconds: float


def solve_model(model: LinearModel, *, method: str = "choose", time_limit_s: float | None = None) -> Answer:
    """Return the optimum of a model: its relaxation first, and branch and bound where that is not integral.

    Args:
        model: the arrays.
        method: ``simplex``, ``ipm`` or ``choose``, for the relaxation.
        time_limit_s: for the whole solve.

    Raises:
        AutoparError: the solver failed for another reason than infeasibility or time.
    """
    begin = time.perf_counter()
    scale = _scale(model)
    relaxed = _run(model, scale, f"solver = {method}\n", integral=False, time_limit_s=time_limit_s)
    if relaxed.status != "optimal":
        return _timed(relaxed, begin)
    decided = relaxed.values[model.integral]
    if np.abs(decided - np.round(decided)).max(initial=0.0) <= INTEGRAL_TOLERANCE:
        return _timed(relaxed, begin)
    return _timed(_run(model, scale, _EXACT, integral=True, time_limit_s=time_limit_s), begin)


def _timed(answer: Answer, begin: float) -> Answer:
    return Answer(
        answer.status,
        answer.values,
        answer.objective,
        answer.bound,
        answer.relaxed,
        time.perf_counter() - begin,
    )


def _scale(model: LinearModel) -> float:
    """Return the factor that brings the largest cost to about 1000: tolerances of the solver are absolute."""
    largest = float(np.abs(model.cost).max(initial=0.0))
    return 1.0 if largest == 0.0 else float(2.0 ** np.round(np.log2(1000.0 / largest)))


def _run(model: LinearModel, scale: float, parameters: str, *, integral: bool, time_limit_s: float | None) -> Answer:
    helper = model_builder_helper.ModelBuilderHelper()
    helper.fill_model_from_sparse_data(
        np.zeros(model.num_variables),
        model.upper,
        model.cost * scale,
        model.row_lower,
        model.row_upper,
        model.matrix,
    )
    if integral:
        for index in np.flatnonzero(model.integral).tolist():
            helper.set_var_integrality(index, True)
    solver = model_builder_helper.ModelSolverHelper("highs")
    solver.enable_output(False)
    solver.set_solver_specific_parameters(_COMMON + parameters)
    if time_limit_s is not None:
        solver.set_time_limit_in_seconds(time_limit_s)
    solver.solve(helper)
    status = solver.status()
    known = model_builder_helper.SolveStatus
    if status == known.INFEASIBLE:
        return Answer("infeasible", np.zeros(0), np.inf, np.inf, not integral, 0.0)
    if status not in (known.OPTIMAL, known.FEASIBLE):
        raise AutoparError(
            f"the solver stopped with {status.name} on {model.num_variables} variables and {model.num_rows} rows: "
            f"{solver.status_string()}; give it more time or a smaller problem"
        )
    objective = float(solver.objective_value()) / scale
    proved = status == known.OPTIMAL
    bound = float(solver.best_objective_bound()) / scale if integral else objective
    return Answer(
        "optimal" if proved else "feasible",
        np.asarray(solver.variable_values()),
        objective,
        min(bound, objective),
        not integral,
        0.0,
    )
