"""Plans of the solver compute what one device computes, and move what they list."""

from __future__ import annotations

import pytest

from autopar.errors import InfeasibleError
from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.pipeline import make_plan
from autopar.plans import Options
from autopar.runtime.verify_ranks import verify_ranks
from tests import models
from tests.rotate import todays
from tests.test_property import assert_collectives_are_the_plans

CASES = [("mlp", (2, 2)), ("mlp", (3,)), ("gpt2", (2,)), ("llama", (4,))]


@pytest.mark.parametrize(("name", "sizes"), todays(CASES, lambda case: case[0] == "mlp"))
def test_tight_plans_equal_one_device(name: str, sizes: tuple[int, ...]) -> None:
    """Midway between the least memory and what an unbounded plan takes, the plan splits and lists all that it moves."""
    model, args, kwargs = getattr(models, name)() if name == "mlp" else getattr(models, name)(layers=1)
    program, mesh = annotate(capture(model, args, kwargs)), Mesh(sizes, device="h100")
    with pytest.raises(InfeasibleError) as caught:
        make_plan(program, mesh, Options(memory=1))
    least, free = caught.value.least_bytes, make_plan(program, mesh, Options()).memory.total_bytes
    assert least is not None and least < free
    plan = make_plan(program, mesh, Options(memory=(least + free) // 2))
    assert plan.solver.status == "optimal" and plan.collectives
    result = verify_ranks(model, program, plan, args, kwargs)
    assert_collectives_are_the_plans(program, plan, result)
