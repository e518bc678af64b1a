"""The two ways to an optimum agree, and bounds are bounds."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.fold import fold
from autopar.passes.solve import prove, solver
from autopar.passes.solve.decide import least_bytes
from autopar.passes.solve.layout_graph import Prices
from autopar.passes.solve.model import build_model
from autopar.passes.solve.problem import Problem, build_problem
from autopar.passes.solve.prove import solve_problem, strategy_prices
from autopar.passes.solve.reduce import reduce_problem
from autopar.passes.solve.solver import Answer, branch, dual_bound, is_integral, relax
from autopar.plans import Options
from tests import models


def problem(memory: int | None) -> Problem:
    """Return the problem of the small GPT-2 on slow and fast links."""
    program = annotate(capture(*models.gpt2(width=256, batch=16, length=64)))
    mesh = Mesh((2, 2), device="h100", links=("infiniband_ndr", "nvlink4"))
    return build_problem(program, Prices.of(mesh), Options(memory=memory), fold(program))


@pytest.fixture(scope="module")
def loose() -> Problem:
    """The reduced problem without a budget."""
    return reduce_problem(problem(None))


@pytest.fixture(scope="module")
def tight() -> Problem:
    """The reduced problem with a budget that nothing but computing again meets cheaply."""
    program = annotate(capture(*models.mlp(width=64, hidden=128, batch=256)))
    prices = Prices.of(Mesh((4,), device="h100", links=("infiniband_ndr",)))

    def within(memory: int) -> Problem:
        return build_problem(program, prices, Options(memory=memory), fold(program))

    return reduce_problem(within(int(1.15 * least_bytes(within(1)))))


def solved(given: Problem, large: int = 1 << 30) -> Answer:
    """Return the proved answer of a problem."""
    answer = solve_problem(given, build_model(given), large=large).answer
    assert answer.status == "optimal"
    return answer


def test_simplex_and_pdlp_agree(loose: Problem) -> None:
    """PDLP's prices and the exact rest give the optimum of the simplex method alone."""
    assert math.isclose(solved(loose).objective, solved(loose, large=1).objective, rel_tol=1e-7)


def test_the_proof_agrees_with_branch_and_bound(tight: Problem) -> None:
    """Leaving out what the prices bar gives the optimum of branch and bound on everything."""
    assert math.isclose(solved(tight).objective, branch(build_model(tight)).objective, rel_tol=1e-6)


def test_reductions_keep_the_optimum() -> None:
    """With and without dominated strategies the optimum is one, and the model is smaller."""
    given = problem(None)
    small, full = reduce_problem(given), reduce_problem(given, dominate=False)
    assert build_model(small).num_variables < build_model(full).num_variables
    assert math.isclose(solved(small).objective, solved(full).objective, rel_tol=1e-7)


def test_any_dual_values_give_a_bound(loose: Problem) -> None:
    """The bound is computed here, so it holds however wrong the solver's duals are."""
    optimum, model = solved(loose).objective, build_model(loose)
    generator = np.random.default_rng(0)
    for scale in (0.0, 1e-6, 1e-3):
        bound, prices = dual_bound(model, generator.normal(size=model.num_rows) * scale)
        assert bound <= optimum and (prices >= 0).all()


def test_a_strategy_costs_at_least_its_price(tight: Problem) -> None:
    """Forcing any one strategy makes the optimum dearer by no less than its price says."""
    model = build_model(tight)
    bound, prices = dual_bound(model, relax(model).duals)
    rows = strategy_prices(tight, model, prices)
    generator = np.random.default_rng(0)
    barred = [(i, j) for i, row in enumerate(rows) for j in np.flatnonzero((row > 0.02 * bound) & (row < bound))]
    assert len(barred) > 3
    for place in generator.choice(len(barred), size=4, replace=False):
        index, row = barred[int(place)]
        keep = [np.ones(len(decision.strategies), dtype=np.bool_) for decision in tight.decisions]
        keep[index][:] = np.arange(len(keep[index])) == row
        forced = tight.with_rows(keep)
        answer = relax(build_model(forced))
        assert answer.status == "infeasible" or answer.objective >= (bound + rows[index][row]) * (1 - 1e-9)


@pytest.mark.parametrize("large", [1, 1 << 30])
def test_a_proof_too_large_gives_the_best_plan_with_its_gap(
    tight: Problem, monkeypatch: pytest.MonkeyPatch, large: int
) -> None:
    """Where nothing may be branched on, the plan near the relaxation comes with the bound that is proved.

    So it does where every relaxation is PDLP's, and several decisions are closed at a time.
    """
    optimum = solved(tight).objective
    monkeypatch.setattr(prove, "MOST_BRANCHED", 0)
    monkeypatch.setattr(prove, "relax", lambda model, **how: relax(model, **{**how, "large": large}))
    answer = solve_problem(tight, build_model(tight)).answer
    assert answer.status == "feasible"
    assert answer.bound * (1 - 1e-9) <= optimum <= answer.objective * (1 + 1e-9)
    assert answer.bound < answer.objective < 1.2 * optimum


def test_a_plan_is_found_where_memory_alone_is_open(tight: Problem) -> None:
    """A relaxation that decides every op and keeps a part of a tensor: what fits is found under these decisions."""
    model = build_model(tight)
    keep = [row >= row.max() for row in prove._of_decisions(tight, model, branch(model))]
    assert tight.budget is not None
    found = 0
    for budget in np.linspace(0.9, 1.5, 7) * tight.budget:
        given = replace(tight, budget=int(budget)).with_rows(keep)
        model = build_model(given)
        relaxed = relax(model)
        if relaxed.status == "infeasible" or is_integral(model, relaxed.values):
            continue
        proved = prove._dive(given, model, relaxed, "seconds", None)
        assert proved is not None
        assert proved.answer.objective == pytest.approx(branch(model).objective)
        found += 1
    assert found


def test_branch_and_bound_ends_after_its_nodes(tight: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is one of nodes, not of time: the best that is found until then comes with a bound."""
    draw = np.random.default_rng(0)
    weights = csr_matrix(draw.integers(1, 60, (30, 60)).astype(np.float64))
    knapsack = replace(
        build_model(tight),
        cost=-draw.integers(1, 60, 60).astype(np.float64),
        upper=np.ones(60),
        integral=np.ones(60, dtype=np.bool_),
        matrix=weights,
        row_lower=np.full(30, -np.inf),
        row_upper=np.asarray(weights.sum(axis=1)).ravel() // 3,
    )
    monkeypatch.setattr(solver, "NODE_VARIABLES", 60)
    answer = branch(knapsack)
    assert answer.status == "feasible"
    assert answer.bound < answer.objective < 0


def test_no_plan_within_the_limits_says_what_helps(tight: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Branch and bound that ends without a plan is an error with advice, not a plan of nothing."""
    nothing = Answer("unknown", np.zeros(0), math.inf, -math.inf)
    monkeypatch.setattr(prove, "MOST_DIVES", 0)
    monkeypatch.setattr(prove, "branch", lambda *_, **__: nothing)
    with pytest.raises(AutoparError, match="no plan was found within the limits of branch and bound"):
        solve_problem(tight, build_model(tight))
