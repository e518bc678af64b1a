"""Dropout is traced as a mask that is drawn for the whole tensor, times the input."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .trace_flat import FlatViews


def dropout_of(x: Tensor, p: float) -> Tensor:
    """Return ``x`` with each element dropped with probability ``p`` and the rest scaled by ``1 / (1 - p)``."""
    return x if p == 0.0 else _dropped(x, list(x.shape), p)


def _dropped(x: Tensor, shape: list[int], p: float) -> Tensor:
    if p == 1.0:
        # Eager draws nothing at all here.
        return x * 0.0
    mask = torch.ops.autopar.bernoulli.default(shape, 1.0 - p, x.dtype, x.device, [0] * len(shape), shape)
    return x * mask * (1.0 / (1.0 - p))


def dropout(flat: FlatViews, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Trace ``F.dropout``."""
    return _maybe_inplace(input, list(input.shape), p, training, inplace)


def feature_dropout(flat: FlatViews, input: Tensor, p: float, train: bool) -> Any:
    """Trace ``torch.feature_dropout``, which ``F.dropout2d`` and its like call: whole channels are dropped."""
    return _maybe_inplace(input, [*input.shape[:2], *(1 for _ in input.shape[2:])], p, train, False)


def _maybe_inplace(input: Tensor, shape: list[int], p: float, training: bool, inplace: bool) -> Any:
    if not 0.0 <= p <= 1.0:
        return NotImplemented
    if not training or p == 0.0:
        return input
    result = _dropped(input, shape, p)
    return input.copy_(result) if inplace else result


def _inplace_dropout(flat: FlatViews, input: Tensor, p: float, train: bool) -> Any:
    return dropout(flat, input, p, train, True)


REWRITES = {
    F.dropout: dropout,
    torch.dropout: dropout,
    torch.dropout_: _inplace_dropout,
    torch.feature_dropout: feature_dropout,
}
"""Torch function -> its rewrite."""
