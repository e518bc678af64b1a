"""What is alive at once is kept within the budget: by a made-up solver, and on real plans."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.mesh import Mesh
from autopar.passes.fit_memory import Solve, fit_memory
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
    """No budget, or one that the fastest plan fits with all that is alive at once."""
    solve = solver_of([(100, 90), (50, 60)])
    for budget in (None, 100, 2000):
        plan = fit_memory(solve, budget)
        assert (plan.memory.total_bytes, plan.solver.status) == (100, "optimal")


def test_a_peak_beyond_the_budget_takes_a_reserve() -> None:
    """The next plan that fits with its peak is taken, optimal within what the reserve leaves."""
    plan = fit_memory(solver_of([(100, 130), (90, 95), (50, 60)]), 110)
    assert (plan.memory.total_bytes, plan.memory.reserve_bytes, plan.solver.status) == (50, 30, "optimal")
    assert plan.memory.peak_bytes <= 110 and plan.memory.total_bytes <= 110 - plan.memory.reserve_bytes


def test_what_can_not_be_kept_is_refused() -> None:
    """The solver's refusal passes, with its least budget, which is accepted."""
    solve = solver_of([(100, 90), (50, 60)])
    with pytest.raises(InfeasibleError) as refused:
        fit_memory(solve, 49)
    assert refused.value.least_bytes == 50
    assert fit_memory(solve, 50).memory.total_bytes == 50


def test_without_any_plan_that_fits_at_once_the_report_says_so() -> None:
    """The plan within the whole budget comes back, and its peak is marked."""
    plan = fit_memory(solver_of([(100, 130), (50, 140)]), 110)
    assert (plan.memory.total_bytes, plan.memory.peak_bytes, plan.memory.reserve_bytes) == (100, 130, 0)
    asked = msgspec.structs.replace(plan, options=Options(memory=110))
    assert "beyond the budget" in str(asked)
    assert "beyond the budget" not in str(msgspec.structs.replace(plan, options=Options(memory=130)))


@given(
    table=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=4), budget=st.integers(1, 70)
)
def test_any_reserve_is_kept(table: list[tuple[int, int]], budget: int) -> None:
    """What is kept is within the budget less the reserve; a plan with a reserve fits at once."""
    try:
        plan = fit_memory(solver_of(table), budget)
    except InfeasibleError as error:
        assert error.least_bytes is not None and error.least_bytes > budget
    else:
        assert plan.memory.total_bytes <= budget - plan.memory.reserve_bytes
        assert not plan.memory.reserve_bytes or plan.memory.peak_bytes <= budget


def test_a_real_plan_fits_with_its_peak() -> None:
    """A budget that the kept bytes fit is not enough where temporaries come on top: the reserve makes room."""
    program, mesh = tiny_program(rows=6, width=5, out=8), Mesh((2,), device="h100")
    options = Options(memory=600, optimizer="sgd")
    kept = make_plan(program, mesh, options, lowered=False).memory
    found = make_plan(program, mesh, options).memory
    assert kept.total_bytes <= 600 < kept.peak_bytes
    assert found.peak_bytes <= 600
    assert 0 < found.reserve_bytes <= 600 - found.total_bytes
