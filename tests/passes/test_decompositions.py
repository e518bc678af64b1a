"""Looks at memory become reads at indices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autopar.errors import CaptureError
from autopar.passes.capture import capture
from tests.verified import Around, verified_function


def _written(x: Tensor) -> Tensor:
    copy = x * 1
    copy.as_strided((4,), (7,)).mul_(3.0)
    return copy


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.as_strided((3, 6, 2), (6, 1, 6)),
        lambda x: x.t().as_strided((3, 6, 2), (6, 1, 3)),
        lambda x: x.view(2, 2, 6).transpose(0, 1).as_strided((2, 4), (12, 2)),
        lambda x: x.as_strided((2, 4), (0, 1)),
        lambda x: x.as_strided((4, 2), (6, 1), 3),
        lambda x: x.t().as_strided((2, 12), (12, 1)),
        _written,
    ],
)
def test_strides(function: Callable[[Tensor], Tensor]) -> None:
    """Windows, repeats and writes, also of tensors that do not lie row after row."""
    verified_function(lambda x: function(x).tanh() * 2)


def test_looks_past_the_operand_are_refused() -> None:
    """What lies behind a slice is not part of it."""
    with pytest.raises(CaptureError, match="looks at how its operand lies in memory"):
        capture(Around(lambda x: x[:, 1:].as_strided((2, 2), (6, 1))), (torch.randn(4, 6, dtype=torch.float64),))


def test_products_with_complex_numbers() -> None:
    """The backward conjugates the number as well: in double precision, whatever the default is."""
    verified_function(lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2)).conj() * (0.1 + 2j)).tanh())
