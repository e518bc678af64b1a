"""The property that everything rests on: any model, any mesh, any legal plan equals one device."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.collectives_of import collectives_of
from autopar.passes.lower import lower
from autopar.passes.program import Program
from autopar.plans import Plan
from autopar.runtime.simulate import StepResult
from autopar.runtime.verify_ranks import verify_ranks
from tests import models
from tests.rotate import todays
from tests.strategies.graphs import Recipe, recipes
from tests.strategies.plans import meshes, plans, seeded_plan


def assert_collectives_are_the_plans(program: Program, plan: Plan, result: StepResult) -> None:
    """Assert that what ran is what the plan lists and what the lowered graph shows: kinds, axes, tensors, bytes."""
    ran = Counter((m.kind, m.axis, m.tensor, m.phase, m.bytes) for m in result.moved)
    planned = Counter((r.kind, r.axis, r.tensor, r.phase, r.bytes) for r in plan.collectives)
    assert ran == planned
    local = lower(program, plan, (0,) * plan.mesh.num_axes)
    shown = Counter((r.kind, r.axis, r.tensor, r.phase, r.bytes) for r in collectives_of(local))
    assert shown == planned


@pytest.mark.timeout(1800)
@settings(max_examples=4 * settings.default.max_examples // 5)
@given(recipes(), meshes(), st.data())
def test_any_plan_equals_one_device(recipe: Recipe, mesh: Mesh, data: st.DataObject) -> None:
    """Outputs, every gradient, buffers and stepped parameters equal the eager module's, whatever the plan."""
    model, args = recipe.build()
    program = annotate(capture(model, args))
    plan = data.draw(plans(program, mesh))
    result = verify_ranks(model, program, plan, args, optimizer="adamw")
    assert_collectives_are_the_plans(program, plan, result)


REAL = [(name, sizes, dropout) for name in models.MODELS for sizes, dropout in (((3,), 0.2), ((2, 2), 0.0))]


@pytest.mark.parametrize(("name", "sizes", "dropout"), todays(REAL, lambda case: case[0]))
def test_random_plans_of_real_models(name: str, sizes: tuple[int, ...], dropout: float) -> None:
    """Real models, with and without dropout, under plans that a seed decides."""
    model, args, kwargs = getattr(models, name)(dropout=dropout) if name != "llama" else models.llama()
    program = annotate(capture(model, args, kwargs))
    plan = seeded_plan(program, Mesh(sizes), len(name))
    result = verify_ranks(model, program, plan, args, kwargs)
    assert_collectives_are_the_plans(program, plan, result)
