"""The two ways to an optimum agree, and bounds are bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.fold import fold
from autopar.passes.solve.layout_graph import Prices
from autopar.passes.solve.model import LinearModel, build_model
from autopar.passes.solve.problem import Problem, build_problem
from autopar.passes.solve.reduce import reduce_problem
from autopar.passes.solve.solver import dual_bound, solve_model
from autopar.plans import Options
from tests import models


def problem(memory: int | None) -> Problem:
    """Return the problem of the small GPT-2 on slow and fast links."""
    program = annotate(capture(*models.gpt2(width=256, batch=16, length=64)))
    mesh = Mesh((2, 2), device="h100", links=("infiniband_ndr", "nvlink4"))
    return build_problem(program, Prices.of(mesh), Options(memory=memory), fold(program))


@pytest.fixture(scope="module")
def loose() -> LinearModel:
    """The model without a budget."""
    return build_model(reduce_problem(problem(None)))


def test_bounded_and_whole_solves_agree(loose: LinearModel) -> None:
    """PDLP's prices and the exact rest give the optimum of HiGHS alone."""
    whole, bounded = solve_model(loose), solve_model(loose, large=1)
    assert whole.status == bounded.status == "optimal"
    assert math.isclose(whole.objective, bounded.objective, rel_tol=1e-7)


def test_reductions_keep_the_optimum() -> None:
    """With and without dominated strategies the optimum is one, and the model is smaller."""
    given = problem(None)
    small, full = build_model(reduce_problem(given)), build_model(reduce_problem(given, dominate=False))
    assert small.num_variables < full.num_variables
    assert math.isclose(solve_model(small).objective, solve_model(full).objective, rel_tol=1e-7)


def test_any_dual_values_give_a_bound(loose: LinearModel) -> None:
    """The bound is computed here, so it holds however wrong the solver's duals are."""
    optimum = solve_model(loose).objective
    generator = np.random.default_rng(0)
    for scale in (0.0, 1e-6, 1e-3):
        bound, prices = dual_bound(loose, generator.normal(size=loose.num_rows) * scale)
        assert bound <= optimum and (prices >= 0).all()
