"""Dropout is traced as a mask that is drawn for the whole tensor, times the input."""

from __future__ import annotations

from collections.abc import Callable
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
    return x * keep_mask(x.new_empty(shape) if shape != list(x.shape) else x, p) * (1.0 / (1.0 - p))


def keep_mask(like: Tensor, p: float) -> Tensor:
    """Return a 0/1 mask of the shape and dtype of ``like``, drawn in the order in which eager dropout draws.

    That is the order of the elements in memory: a transposed tensor gets the transposed mask.
    """
    return drawn_mask(like, 1.0 - p)


def drawn_mask(like: Tensor, keep: float) -> Tensor:
    """Return the same, ones with probability ``keep``."""
    order = memory_order(torch.empty_like(like))
    shape = [like.shape[dim] for dim in order]
    mask: Tensor = torch.ops.autopar.bernoulli.default(shape, keep, like.dtype, like.device, [0] * len(shape), shape)
    return mask if order == sorted(order) else mask.permute([order.index(dim) for dim in range(len(order))])


def memory_order(x: Tensor) -> list[int]:
    """Return the dims of ``x``, the one with the longest stride first; dims of size 1 stay where they are."""
    long = [dim for dim in range(x.dim()) if x.shape[dim] != 1]
    sorted_long = iter(sorted(long, key=lambda dim: x.stride()[dim], reverse=True))
    return [next(sorted_long) if x.shape[dim] != 1 else dim for dim in range(x.dim())]


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


def bernoulli_(flat: FlatViews, input: Tensor, p: Any = 0.5, *, generator: Any = None) -> Any:
    """Trace ``Tensor.bernoulli_`` with one probability for all elements."""
    plain = generator is None and isinstance(p, (int, float)) and 0.0 <= p <= 1.0 and input.dtype.is_floating_point
    return input.copy_(drawn_mask(input, float(p))) if plain else NotImplemented


def bernoulli(flat: FlatViews, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Trace ``torch.bernoulli`` of what has a gradient: torch has none for it, and refuses only who asks for one."""
    return torch.bernoulli(input.detach(), *args, **kwargs) if input.requires_grad else NotImplemented


REWRITES: dict[Any, Callable[..., Any]] = {
    F.dropout: dropout,
    torch.dropout: dropout,
    torch.dropout_: _inplace_dropout,
    torch.feature_dropout: feature_dropout,
    **dict.fromkeys((torch.bernoulli, Tensor.bernoulli), bernoulli),
    Tensor.bernoulli_: bernoulli_,
}
"""Torch function -> its rewrite."""
