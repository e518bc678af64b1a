"""Which library op carries out a contraction or a view."""

from __future__ import annotations

import pytest
import torch

import autopar.passes.ops  # noqa: F401
from autopar.passes.local_ops import local_op

SIZES = {"a": 2, "b": 3, "c": 4, "i": 5, "k": 6, "n": 7}


@pytest.mark.parametrize(
    ("equation", "name"),
    [
        ("abk,nk->abn", "linear"),
        ("k,nk->n", "linear"),
        ("abk,kn->abn", "matmul"),
        ("abik,abkn->abin", "matmul"),
        ("kn,abk->abn", "matmul"),
        ("aik,akn->ain", "matmul"),
        ("akn,aik->ain", "matmul"),
        ("abk,abn->nk", "einsum"),
        ("ik,nk->ni", "einsum"),
        ("abk,akn->abn", "matmul"),
        ("abk,bkn->abn", "einsum"),
        ("i,n->in", "einsum"),
    ],
)
def test_contractions(equation: str, name: str) -> None:
    """The op that is chosen computes the equation."""
    operands, _ = equation.split("->")
    left, right = operands.split(",")
    a, b = (torch.randn([SIZES[letter] for letter in term], dtype=torch.float64) for term in (left, right))
    target, args = local_op(torch.ops.autopar.contract.default, (a, b, equation))
    assert str(target) == f"aten.{name}.default"
    torch.testing.assert_close(target(*args), torch.einsum(equation, a, b))


def test_views_become_reshapes_and_the_rest_stays() -> None:
    """A piece need not have the strides of the whole."""
    aten = torch.ops.aten
    assert local_op(aten.view.default, (1, [2]))[0] is aten.reshape.default
    assert local_op(aten._unsafe_view.default, (1, [2]))[0] is aten.reshape.default
    assert local_op(aten.relu.default, (1,)) == (aten.relu.default, (1,))
