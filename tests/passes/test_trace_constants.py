"""Shapes that depend on constants alone are known while a model is traced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.errors import CaptureError
from autopar.passes.capture import capture
from tests.verified import Around, verified_function

ROWS = torch.tensor([True, False, True, True])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[ROWS].square().sum(),
        lambda x: x[:, torch.tensor([True, False] * 3)].square().sum(),
        lambda x: x[torch.arange(4) > 1].square().sum(),
        lambda x: (x @ x.T)[torch.ones(4, 4).triu(1).bool()].square().sum(),
        lambda x: x.masked_select(torch.arange(6) > 2).square().sum(),
        lambda x: x[torch.nonzero(torch.arange(4) > 1)[:, 0]].square().sum(),
        lambda x: x[torch.unique(torch.tensor([2, 0, 0]))].square().sum(),
        lambda x: (x * F.one_hot(torch.tensor([0, 1, 2, 5]))).square().sum(),
        lambda x: x.square().sum() * torch.bincount(torch.arange(4), minlength=6).sum(),
    ],
)
def test_constant_masks_and_places(function: Callable[[Tensor], Tensor]) -> None:
    """A read at a constant mask, at constant places, or of a constant's own shape."""
    verified_function(function)


def test_masks_of_data_are_refused() -> None:
    """The number of elements is not known."""
    with pytest.raises(CaptureError, match="shape that depends on data"):
        capture(Around(lambda x: x[x > 0].sum()), (torch.randn(4, 6, dtype=torch.float64),))


def test_lists_of_inputs_are_refused_as_reads_of_data() -> None:
    """``tolist`` of an input says what it is, not that storage is missing."""
    with pytest.raises(CaptureError, match="needs the value of a tensor"):
        capture(Around(lambda x: x * sum(x.tolist()[0])), (torch.randn(4, 6, dtype=torch.float64),))
