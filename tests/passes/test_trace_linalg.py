"""Matrix functions that raise, and covariances."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.lower import lower
from autopar.runtime.simulate import simulate_step
from tests.strategies.plans import seeded_plan
from tests.verified import Around, verified_function

EYE = torch.eye(6, dtype=torch.float64)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.linalg.inv(x.T @ x + EYE).square().sum(),
        lambda x: (x.T @ x + EYE).inverse().square().sum(),
        lambda x: torch.linalg.solve(x.T @ x + EYE, x.T).square().sum(),
        lambda x: torch.linalg.solve(x.T @ x + EYE, x, left=False).square().sum(),
        lambda x: torch.linalg.cholesky(x.T @ x + EYE).square().sum(),
        lambda x: torch.linalg.cholesky(x.T @ x + EYE, upper=True).square().sum(),
        lambda x: torch.cov(x.T).square().sum(),
        lambda x: torch.cov(x[0], correction=0).square().sum(),
        lambda x: torch.corrcoef(x).square().sum(),
    ],
)
def test_matrix_functions(function: Callable[[Tensor], Tensor]) -> None:
    """Values and gradients under random plans."""
    verified_function(function)


def test_a_matrix_that_can_not_be_inverted_gives_nan() -> None:
    """Eager raises there; a program can't, and must not go on with numbers."""
    program = annotate(capture(Around(lambda x: torch.linalg.inv(x.T @ x)), (torch.zeros(4, 6).double(),)))
    plan = seeded_plan(program, Mesh((2,)), 0)
    ranks = [lower(program, plan, c, run=False) for c in plan.mesh.coordinates()]
    shapes = {role.node: program.nodes()[role.node].meta["val"].shape for role in program.inputs}
    values = {node: torch.zeros(shape, dtype=torch.float64) for node, shape in shapes.items()}
    found = simulate_step(ranks, values).values[0]
    assert found is not None and found.isnan().all()
