"""Step time against memory."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import OptionError, PlanError
from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.pipeline import make_plan
from autopar.plans import Options, Plan
from tests import models
from tests.passes.solve.small_programs import small_programs


@given(st.data())
@settings(max_examples=max(1, settings.default.max_examples // 5))
def test_more_memory_never_makes_a_slower_plan(data: st.DataObject) -> None:
    """On any small program, along the whole curve; the ends are the least budget and the fastest plan."""
    program = data.draw(small_programs())
    mesh = Mesh((2,), device="a100", links=data.draw(st.sampled_from([("nvlink4",), ("ethernet",)])))
    points = make_plan(program, mesh, Options(optimizer="momentum")).frontier(5)
    fastest = make_plan(program, mesh, Options(optimizer="momentum"))
    assert points[-1].step_seconds == pytest.approx(fastest.cost.step_seconds)
    for before, after in pairwise(points):
        assert after.budget_bytes > before.budget_bytes
        assert after.step_seconds <= before.step_seconds
    assert all(point.memory_bytes <= point.budget_bytes for point in points)


def test_a_tight_budget_computes_again_and_the_price_of_memory_is_told() -> None:
    """The curve of a decoder with a long batch: less memory costs time, ops are computed again, the plan says so."""
    program = annotate(capture(*models.gpt2(layers=4, width=32, batch=8, length=64)))
    mesh = Mesh((2,), device="h100")
    points = make_plan(program, mesh, Options(optimizer="sgd")).frontier(4)
    assert points[0].step_seconds > points[-1].step_seconds
    assert points[0].recomputed > 0
    plan = make_plan(program, mesh, Options(optimizer="sgd", memory=points[0].budget_bytes))
    assert plan.solver.next_gb_s > 0
    assert "computed again in the backward" in str(plan)
    assert "1 GB more a rank would save" in str(plan)


def test_a_loaded_plan_of_another_process_has_no_frontier() -> None:
    """The error says that the model is needed; too few points are refused."""
    program = annotate(capture(*models.mlp()))
    plan = make_plan(program, Mesh((2,), device="h100"))
    with pytest.raises(OptionError, match="at least 2"):
        plan.frontier(1)
    stranger = Plan.from_bytes(plan.to_bytes().replace(plan.fingerprint.encode(), b"0" * len(plan.fingerprint)))
    with pytest.raises(PlanError, match="needs the model"):
        stranger.frontier()
