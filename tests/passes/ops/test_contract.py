"""``autopar::contract``: gradients, complex ones too."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import AutoparError
from autopar.passes.ops.contract import parse_equation


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


@pytest.mark.parametrize(
    "equation",
    ["abk,nk->abn", "abk,kn->abn", "abij,abjk->abik", "ak,bk->kab", "a,b->ba", "ab,ab->", "abc,cb->a", "ab,b->ab"],
)
def test_equals_einsum(equation: str) -> None:
    """Results and gradients are those of einsum, contiguous, and the fake kernel agrees."""
    left, right, _ = parse_equation(equation)
    sizes = {letter: 2 + i for i, letter in enumerate(sorted(set(left + right)))}
    a, b = (torch.randn([sizes[x] for x in part], dtype=torch.float64, requires_grad=True) for part in (left, right))
    found, expected = torch.ops.autopar.contract(a, b, equation), torch.einsum(equation, a, b)
    torch.testing.assert_close(found, expected)
    assert found.is_contiguous()
    torch.library.opcheck(torch.ops.autopar.contract.default, (a, b, equation), test_utils=("test_faketensor",))
    grad = torch.randn_like(expected)
    for mine, theirs in zip(torch.autograd.grad(found, (a, b), grad), torch.autograd.grad(expected, (a, b), grad)):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("equation", "fault"),
    [
        ("ab,bc", "not of the form"),
        ("a...,b->ab", "not of the form"),
        ("aab,bc->ac", "twice"),
        ("ab,bc->ad", "no operand has"),
        ("abk,bc->ac", "must be in both operands"),
    ],
)
def test_bad_equations(equation: str, fault: str) -> None:
    """An equation that the op can't mean is refused with the reason."""
    with pytest.raises(AutoparError, match=fault):
        parse_equation(equation)


def test_bad_operands() -> None:
    """Operands that do not fit the equation or each other are refused."""
    contract = torch.ops.autopar.contract
    with pytest.raises(AutoparError, match=r"operand of shape \(2, 3\)"):
        contract(torch.ones(2, 3), torch.ones(3, 4), "abk,kn->abn")
    with pytest.raises(AutoparError, match=r"'b' has two sizes"):
        contract(torch.ones(2, 3), torch.ones(4, 4), "ab,bc->ac")
    with pytest.raises(AutoparError, match=r"float32 and torch\.float64"):
        contract(torch.ones(2, 3), torch.ones(3, 4).double(), "ab,bc->ac")
