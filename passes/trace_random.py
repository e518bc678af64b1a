"""Dropout is traced as a mask that is drawn for the whole tensor, times the input."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    order = _memory_order(x) if shape == list(x.shape) else list(range(len(shape)))
    drawn = [shape[dim] for dim in order]
    mask: Tensor = torch.ops.autopar.bernoulli.default(drawn, 1.0 - p, x.dtype, x.device, [0] * len(shape), drawn)
    if order != sorted(order):
        mask = mask.permute([order.index(dim) for dim in range(len(order))])
    return x * mask * (1.0 / (1.0 - p))


def _memory_order(x: Tensor) -> list[int]:
    """Return the dims of ``x`` from the slowest to the fastest: eager draws a mask that lies as ``x`` does."""
    strides = torch.empty_like(x).stride()
    if all(size == 1 or stride == dense for size, stride, dense in zip(x.shape, strides, _dense(x.shape))):
        return list(range(x.dim()))
    return sorted(range(x.dim()), key=lambda dim: -strides[dim])


def _dense(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


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
