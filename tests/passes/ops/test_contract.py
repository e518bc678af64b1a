"""``autopar::contract``: gradients, complex ones too."""

from __future__ import annotations

import pytest
import torch

from autopar.passes.ops import contract as _  # noqa: F401


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradients_are_those_of_einsum(dtype: torch.dtype) -> None:
    """A complex operand is conjugated in the gradient of the other one."""
    a = torch.randn(2, 3, 4, dtype=dtype, requires_grad=True)
    b = torch.randn(5, 4, dtype=dtype, requires_grad=True)
    grad = torch.randn(2, 3, 5, dtype=dtype)
    found = torch.autograd.grad(torch.ops.autopar.contract(a, b, "abk,nk->abn"), (a, b), grad)
    expected = torch.autograd.grad(torch.einsum("abk,nk->abn", a, b), (a, b), grad)
    for mine, theirs in zip(found, expected):
        torch.testing.assert_close(mine, theirs)
