"""Matrix functions that raise, and covariances."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autopar.errors import CaptureError
from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.lower import lower
from autopar.runtime.simulate import simulate_step
from tests.strategies.plans import seeded_plan
from tests.verified import Around, verified_function

WINDOW = torch.hann_window(4, dtype=torch.float64)
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
        lambda x: torch.linalg.lu_factor(x.T @ x + EYE)[0].square().sum(),
        lambda x: torch.linalg.tensorinv((x.T @ x + EYE).view(2, 3, 6), 2).square().sum(),
        lambda x: torch.linalg.tensorsolve(x.T @ x + EYE, x[0]).square().sum(),
        lambda x: torch.linalg.matrix_power(x.T @ x + EYE, -2).square().sum(),
        lambda x: torch.linalg.eigvals(x.T @ x + EYE).abs().square().sum(),
        lambda x: torch.istft(torch.stft(x, 4, 2, window=WINDOW, return_complex=True), 4, 2, window=WINDOW).square(),
        lambda x: torch.cov(x.T).square().sum(),
        lambda x: torch.cov(x[0], correction=0).square().sum(),
        lambda x: torch.corrcoef(x).square().sum(),
    ],
)
def test_matrix_functions(function: Callable[[Tensor], Tensor]) -> None:
    """Values and gradients under random plans."""
    verified_function(function)


@pytest.mark.parametrize(
    "function",
    [
        torch.linalg.inv,
        lambda x: torch.linalg.tensorinv(x.view(2, 3, 6), 2),
        lambda x: torch.linalg.tensorsolve(x, EYE[0]),
        lambda x: torch.linalg.matrix_power(x, -1),
    ],
)
def test_a_matrix_that_can_not_be_inverted_gives_nan(function: Callable[[Tensor], Tensor]) -> None:
    """Eager raises there; a program can't, and must not go on with numbers."""
    program = annotate(capture(Around(lambda x: function(x.T @ x)), (torch.zeros(4, 6).double(),)))
    plan = seeded_plan(program, Mesh((2,)), 0)
    ranks = [lower(program, plan, c, run=False) for c in plan.mesh.coordinates()]
    shapes = {role.node: program.nodes()[role.node].meta["val"].shape for role in program.inputs}
    values = {node: torch.zeros(shape, dtype=torch.float64) for node, shape in shapes.items()}
    found = simulate_step(ranks, values).values[0]
    assert found is not None and not found.isfinite().any()


def test_a_factorisation_inside_of_a_transform_is_refused() -> None:
    """There no rewrite sees it, and half a factor is finite."""
    model = Around(lambda x: torch.func.vmap(torch.linalg.cholesky)((x.T @ x + EYE)[None]))
    with pytest.raises(CaptureError, match=r"linalg.cholesky looks at its result to raise.*cholesky_ex"):
        capture(model, (torch.randn(4, 6).double(),))
