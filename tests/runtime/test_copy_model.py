"""Modules are copied whatever tensors they hold."""

from __future__ import annotations

import torch
from torch import nn

from autopar.runtime.copy_model import copy_model
from autopar.runtime.shadow import copy_without_data
from tests.verified import verified


def test_weight_norm_by_hooks() -> None:
    """The weights that such a module computed when it was made are computed anew: it splits like any other."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 8)), nn.utils.spectral_norm(nn.Linear(8, 6))).double()
    verified(model, (torch.randn(4, 6, dtype=torch.float64),))
    assert all(p.is_meta for p in copy_without_data(model).parameters())


def test_a_copy_shares_nothing_and_keeps_its_values() -> None:
    """Tensors with a history are found in containers too; of one tensor there is one copy."""
    model = nn.Linear(2, 2)
    product = model.weight * 2
    model.seen, model.kept = [product], {"last": product}  # type: ignore[assignment]
    copied = copy_model(model)
    (seen,), kept = copied.seen, copied.kept["last"]  # type: ignore[misc, index]
    assert seen is kept
    assert seen is not product
    assert seen.is_leaf
    assert torch.equal(seen, product)
    assert copied.weight is not model.weight


def test_what_the_memo_says_is_taken() -> None:
    """A caller that replaces parameters does so here as well."""
    model = nn.Linear(2, 2)
    other = nn.Parameter(torch.zeros(2, 2))
    assert copy_model(model, {id(model.weight): other}).weight is other
