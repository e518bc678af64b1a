"""Signatures: equal exactly when one program serves both calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import InputError
from autopar.runtime.signature import Signature, checksum, take_apart

CPU = torch.device("cpu")


def signature(module: nn.Module, *args: Any, **kwargs: Any) -> Signature:
    """Return the signature of a call."""
    return take_apart(module, args, kwargs, CPU).signature


def test_same_call() -> None:
    """Other contents and another order of keywords are the same signature."""
    module, x = nn.Linear(2, 2), torch.zeros(3, 2)
    assert signature(module, x, a=1, b=x) == signature(module, x + 1, b=x, a=1)


@pytest.mark.parametrize("change", ["shape", "dtype", "constant", "tree", "grad", "mode", "part", "frozen", "no_grad"])
def test_other_call(change: str) -> None:
    """Everything that a program is traced for makes another signature."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    x = torch.zeros(3, 2)
    before = signature(module, x, n=1)
    kwargs: dict[str, Any] = {"n": 1}
    if change == "shape":
        x = torch.zeros(4, 2)
    elif change == "dtype":
        x = x.double()
    elif change == "constant":
        kwargs = {"n": 2}
    elif change == "tree":
        kwargs = {"n": [1]}
    elif change == "grad":
        x.requires_grad_()
    elif change == "mode":
        module.eval()
    elif change == "part":
        module[1].eval()
    elif change == "frozen":
        module[0].bias.requires_grad_(False)
    with torch.set_grad_enabled(change != "no_grad"):
        assert signature(module, x, **kwargs) != before


def test_gradient_wanted() -> None:
    """A backward is needed in grad mode when anything requires a gradient."""
    module = nn.Linear(2, 2)
    assert signature(module, torch.zeros(1, 2)).gradient
    with torch.no_grad():
        assert not signature(module, torch.zeros(1, 2)).gradient
    module.requires_grad_(False)
    assert not signature(module, torch.zeros(1, 2)).gradient
    assert signature(module, torch.zeros(1, 2, requires_grad=True)).gradient


def test_refused() -> None:
    """A leaf of a strange type or on another device is refused by its path."""
    module = nn.Linear(2, 2)
    with pytest.raises(InputError, match=r"kwargs\['a'\]\[0\] is a object"):
        signature(module, a=[object()])
    with pytest.raises(InputError, match=r"args\[0\] is on meta"):
        signature(module, torch.zeros(2, device="meta"))
    with pytest.raises(InputError, match=r"args\[0\] is a tensor of the layout torch.sparse_coo.*to_dense"):
        signature(module, torch.ones(2).to_sparse())


def test_checksum() -> None:
    """A checksum depends on the contents and on their order, not on strides."""
    x = torch.arange(6.0).reshape(2, 3)
    assert checksum([x, 1, None]) == checksum([x.t().contiguous().t()])
    assert checksum([x]) != checksum([x.flip(0)])
    assert checksum([x.bfloat16(), torch.tensor(True)]) != checksum([x.bfloat16(), torch.tensor(False)])
