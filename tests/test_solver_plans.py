"""Plans of the solver compute what one device computes, and move what they list."""

from __future__ import annotations

import pytest

from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.pipeline import make_plan
from autopar.plans import Options
from autopar.runtime.verify_ranks import verify_ranks
from tests import models
from tests.test_property import assert_collectives_are_the_plans


@pytest.mark.parametrize(("name", "sizes"), [("mlp", (2, 2)), ("mlp", (3,)), ("gpt2", (2,)), ("llama", (4,))])
def test_tight_plans_equal_one_device(name: str, sizes: tuple[int, ...]) -> None:
    """With half the memory that replication takes, the plan has to split; it lists every collective that runs."""
    model, args, kwargs = getattr(models, name)() if name == "mlp" else getattr(models, name)(layers=1)
    program, mesh = annotate(capture(model, args, kwargs)), Mesh(sizes, device="h100")
    whole = sum(p.numel() for p in model.parameters()) * 16
    plan = make_plan(program, mesh, Options(memory=int(whole * 0.6)))
    assert plan.solver.status == "optimal" and plan.collectives
    result = verify_ranks(model, program, plan, args, kwargs)
    assert_collectives_are_the_plans(program, plan, result)
