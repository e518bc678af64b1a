"""Reads and writes at masks and counts whose number of elements is not needed: they are traced at every element."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .trace_flat import FlatViews


def setitem(flat: FlatViews, input: Tensor, index: Any, value: Any) -> Any:
    """Trace ``input[mask] = value`` where the value is the same for every place that the mask has."""
    mask = _mask(index)
    if mask is None or not isinstance(value, Tensor) or differs_by_place(input, index, value):
        return NotImplemented
    rest = input.dim() - mask.dim()
    same = value.reshape(value.shape[1:]) if value.dim() == rest + 1 else value
    input.copy_(torch.where(mask[(..., *[None] * rest)], same.to(input.dtype), input))
    return None


def differs_by_place(input: Tensor, index: Any, value: Any) -> bool:
    """Tell whether what is written at an index differs from place to place, or the index is no mask of the input."""
    mask = _mask(index)
    if mask is None or input.shape[: mask.dim()] != mask.shape:
        return True
    rest = input.dim() - mask.dim()
    return isinstance(value, Tensor) and value.dim() > rest and (value.dim() > rest + 1 or value.shape[0] != 1)


def _mask(index: Any) -> Tensor | None:
    """Return the mask that an index is made of alone, None if it is another one."""
    parts = list(index) if isinstance(index, tuple) else [index]
    while len(parts) > 1 and _is_everything(parts[-1]):
        parts.pop()
    mask = parts[0] if len(parts) == 1 else None
    return mask if isinstance(mask, Tensor) and mask.dtype is torch.bool and mask.dim() > 0 else None


def _is_everything(part: Any) -> bool:
    return part is Ellipsis or (isinstance(part, slice) and part == slice(None))


def embedding(
    flat: FlatViews,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Trace a lookup with a sparse gradient as one with a dense gradient of the same numbers."""
    if not sparse:
        return NotImplemented
    return torch.embedding(weight, indices, padding_idx, scale_grad_by_freq)


def bincount(flat: FlatViews, input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    """Trace ``torch.bincount`` as long as ``minlength`` says; a value beyond it raises when the program runs."""
    if minlength <= 0 or input.dtype is torch.bool or input.dtype.is_floating_point:
        return NotImplemented
    if weights is None:
        weights = torch.ones_like(input, dtype=torch.int64)
    elif weights.dtype is not torch.float32:
        weights = weights.to(torch.float64)
    counts = torch.zeros(minlength, dtype=weights.dtype, device=input.device)
    return counts.index_add(0, input.long(), weights.detach())


def combinations(flat: FlatViews, input: Tensor, r: int = 2, with_replacement: bool = False) -> Any:
    """Trace ``torch.combinations`` as a read at places that depend on the length alone."""
    if input.dim() != 1 or r < 1:
        return NotImplemented
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = torch.tensor(list(choose(range(input.shape[0]), r)), dtype=torch.int64, device=input.device)
    return input[places.reshape(-1, r)]


REWRITES: dict[Any, Callable[..., Any]] = {
    Tensor.__setitem__: setitem,
    torch.embedding: embedding,
    torch.combinations: combinations,
    **dict.fromkeys((torch.bincount, Tensor.bincount), bincount),
}
"""Torch function -> its rewrite."""
