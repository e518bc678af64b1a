"""Bags of embeddings are traced as a lookup and a reduction, so that the table, the bags and the batch can be split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .trace_flat import FlatViews


def embedding_bag(
    flat: FlatViews,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Trace ``F.embedding_bag``: bags are rows of a matrix of indices, or start at ``offsets`` of a vector."""
    if max_norm is not None or scale_grad_by_freq or sparse or mode not in ("sum", "mean"):
        return NotImplemented
    if (per_sample_weights is not None and mode != "sum") or (input.dim() == 1) != (offsets is not None):
        return NotImplemented
    rows = F.embedding(input, weight)
    present = torch.ones_like(input, dtype=weight.dtype)
    if padding_idx is not None:
        present = (input != padding_idx % weight.shape[0]).to(weight.dtype)
        rows = rows * present.unsqueeze(-1)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if offsets is None:
        total, count = rows.sum(1), present.sum(1)
    else:
        starts = offsets[:-1] if include_last_offset else offsets
        place = torch.arange(input.shape[0], device=input.device)
        bag = torch.searchsorted(starts, place.to(starts.dtype), right=True) - 1
        total = rows.new_zeros(starts.shape[0], rows.shape[1]).index_add(0, bag, rows)
        count = present.new_zeros(starts.shape[0]).index_add(0, bag, present)
    return total if mode == "sum" else total / count.clamp(min=1).unsqueeze(-1)


REWRITES: dict[Any, Callable[..., Any]] = {F.embedding_bag: embedding_bag}
"""Torch function -> its rewrite."""
