"""Scaled dot product attention is traced as ``autopar::attention``, or taken apart where that op can't express it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .trace_flat import FlatViews
from .trace_loss import softmax_of
from .trace_matmul import matmul
from .trace_random import dropout_of


def attention(
    flat: FlatViews,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Trace ``F.scaled_dot_product_attention``."""
    if query.dim() < 2 or key.dim() != query.dim() or value.dim() != query.dim():
        return NotImplemented
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (x.to(dtype) for x in (query, key, value))
    if not query.dtype == key.dtype == value.dtype:
        return NotImplemented
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    if dropout_p > 0.0 or (attn_mask is not None and attn_mask.requires_grad):
        return _apart(flat, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    shape = query.shape
    q, k, v = (_four_dims(x) for x in (query, key, value))
    heads, groups = q.shape[1], k.shape[1]
    if heads != groups and not enable_gqa:
        return NotImplemented
    batch = max(q.shape[0], k.shape[0], v.shape[0])
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        q, k, v = (x.expand(batch, *x.shape[1:]) for x in (q, k, v))
    mask = None if attn_mask is None else _fit_mask(attn_mask, shape, q)
    out, _ = torch.ops.autopar.attention.default(q, k, v, mask, is_causal, scale, 0)
    # Other than four dims lie in memory in their order, as in eager.
    return out if len(shape) == 4 else out.reshape(*shape[:-1], value.shape[-1]).contiguous()


def _four_dims(x: Tensor) -> Tensor:
    if x.dim() == 4:
        return x
    return x[(None,) * (4 - x.dim())] if x.dim() < 4 else x.flatten(0, x.dim() - 4)


def _fit_mask(mask: Tensor, shape: torch.Size, q: Tensor) -> Tensor:
    """Return the mask with four dims, each 1 or full; a float mask in the queries' dtype."""
    if len(shape) > 4:
        mask = mask.expand(*shape[:-2], *mask.shape[-2:]).flatten(0, len(shape) - 4)
    mask = mask[(None,) * (4 - mask.dim())]
    return mask if mask.dtype == torch.bool else mask.to(q.dtype)


def _apart(
    flat: FlatViews, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, causal: bool, scale: float,
    enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """Trace attention as product, softmax, dropout and product, in the order in which eager computes it."""
    if enable_gqa and k.shape[-3] != q.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores: Tensor = matmul(flat, q, k.transpose(-1, -2)) * scale
    if causal:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(seen.logical_not(), -math.inf)
    blind = None
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(mask.logical_not(), -math.inf)
        blind = mask.logical_not().all(-1, keepdim=True)
    elif mask is not None:
        scores = scores + mask.to(scores.dtype)
    if blind is not None:
        scores = scores.masked_fill(blind, 0.0)
    weights = softmax_of(scores, -1)
    if blind is not None:
        weights = weights.masked_fill(blind, 0.0)
    result: Tensor = matmul(flat, dropout_of(weights, dropout_p), v)
    return result


REWRITES: dict[Any, Callable[..., Any]] = {F.scaled_dot_product_attention: attention}
"""Torch function -> its rewrite."""
