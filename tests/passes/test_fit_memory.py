"""What is alive at once is kept within the budget: by a made-up solver, and on real plans."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.mesh import Mesh
from autopar.passes.fit_memory import Solve, fit_memory, needed_bytes
from autopar.passes.pipeline import make_plan
from autopar.plans import Options, Plan
from tests.autopar.fake_plans import small_plan
from tests.passes.tiny_program import tiny_program


def solver_of(table: list[tuple[int, int]]) -> Solve:
    """Return a solver that knows plans of ``(kept, peak)`` bytes, each a second slower than the one before it."""

    def solve(budget: int | None) -> Plan:
        fitting = [i for i, (kept, _) in enumerate(table) if budget is None or kept <= budget]
        if not fitting:
            raise InfeasibleError("no", min(kept for kept, _ in table))
        kept, peak = table[fitting[0]]
        base = small_plan()
        seconds = 1.0 + fitting[0]
        return msgspec.structs.replace(
            base,
            memory=msgspec.structs.replace(base.memory, total_bytes=kept, peak_bytes=peak),
            solver=msgspec.structs.replace(
                base.solver, status="optimal", objective_s=seconds, bound_s=seconds, gap=0.0, variables=9
            ),
        )

    return solve


def test_without_need_the_first_plan_is_the_answer() -> None:
    """The fastest plan fits with all that is alive at once."""
    plan = fit_memory(solver_of([(100, 90), (50, 60)]), 100)
    assert (plan.memory.total_bytes, plan.memory.reserve_bytes) == (100, 0)


def test_a_peak_beyond_the_budget_takes_a_reserve() -> None:
    """The next plan that fits with its peak is taken, optimal within what the reserve leaves."""
    plan = fit_memory(solver_of([(100, 130), (90, 95), (50, 60)]), 110)
    assert (plan.memory.total_bytes, plan.memory.reserve_bytes, plan.solver.status) == (50, 30, "optimal")
    assert plan.memory.peak_bytes <= 110 and plan.memory.total_bytes <= 110 - plan.memory.reserve_bytes


def test_the_refusal_names_a_budget_that_works() -> None:
    """The peak of the plan of least kept bytes counts."""
    solve = solver_of([(100, 200), (50, 90)])
    with pytest.raises(InfeasibleError, match=r"with 90 there is one \(50 are kept; at most 90") as refused:
        fit_memory(solve, 10)
    assert refused.value.least_bytes == 90
    assert fit_memory(solve, 90).memory.peak_bytes == 90
    with pytest.raises(InfeasibleError, match="90"):
        fit_memory(solve, 89)


@given(
    table=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=4), budget=st.integers(1, 70)
)
def test_any_answer_fits_and_any_refusal_is_kept(table: list[tuple[int, int]], budget: int) -> None:
    """A plan fits at once, its reserve left out; the budget that a refusal names is larger, and has a plan."""
    solve = solver_of(table)
    try:
        plan = fit_memory(solve, budget)
    except InfeasibleError as error:
        least = error.least_bytes
        assert least is not None and least > budget
        assert needed_bytes(fit_memory(solve, least)) <= least
    else:
        assert plan.memory.peak_bytes <= budget
        assert plan.memory.total_bytes <= budget - plan.memory.reserve_bytes


def test_a_plan_beyond_the_budget_at_once_says_so() -> None:
    """The report marks a peak beyond the budget where only what is kept was bounded."""
    plan = solver_of([(100, 130)])(None)
    assert "beyond the budget" in str(msgspec.structs.replace(plan, options=Options(memory=110)))
    assert "beyond the budget" not in str(msgspec.structs.replace(plan, options=Options(memory=130)))


def test_a_real_plan_fits_with_its_peak() -> None:
    """A budget that the kept bytes fit is not enough where temporaries come on top: the reserve makes room."""
    program, mesh = tiny_program(rows=6, width=5, out=8), Mesh((2,), device="h100")
    kept = make_plan(program, mesh, Options(memory=600, optimizer="sgd")).memory
    found = make_plan(program, mesh, Options(memory=600, optimizer="sgd", at_once=True)).memory
    assert kept.total_bytes <= 600 < kept.peak_bytes
    assert found.peak_bytes <= 600
    assert 0 < found.reserve_bytes <= 600 - found.total_bytes
