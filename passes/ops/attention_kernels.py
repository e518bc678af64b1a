"""Kernels of ``autopar::attention``: torch's fused ones where they mean the same, plain arithmetic everywhere else."""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of ``lse`` for queries of ``dtype``: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Return keys or values with each head repeated for its group of query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def sum_heads(grad: Tensor, like: Tensor) -> Tensor:
    """Add the gradients of repeated heads into the gradient of ``like``; back in its dtype."""
    if grad.shape[1] != like.shape[1]:
        batch, groups, *rest = like.shape
        grad = grad.reshape(batch, groups, -1, *rest).sum(2)
    return grad.to(like.dtype)


def in_rows(x: Tensor) -> Tensor:
    """Return ``x`` [B, H, L, D] lying in memory as [B, L, H, D]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def additive_mask(
    mask: Tensor | None, causal: bool, offset: int, q: Tensor, keys: int, dtype: torch.dtype
) -> Tensor | None:
    """Return what mask and causality add to the scores, broadcastable to [B, H, L, S]; None for nothing."""
    bias = None
    if mask is not None and mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape, dtype=dtype, device=q.device).masked_fill_(~mask, -torch.inf)
    elif mask is not None:
        bias = mask.to(dtype)
    if causal:
        rows = torch.arange(offset, offset + q.shape[2], device=q.device)[:, None]
        hidden = torch.arange(keys, device=q.device)[None, :] > rows
        ahead = torch.zeros(hidden.shape, dtype=dtype, device=q.device).masked_fill_(hidden, -torch.inf)
        bias = ahead[None, None] if bias is None else bias + ahead
    return bias


def _scores(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, offset: int, dtype: torch.dtype
) -> Tensor:
    scores = torch.matmul(q.to(dtype), repeat_heads(k, q.shape[1]).to(dtype).transpose(-1, -2)) * scale
    bias = additive_mask(mask, causal, offset, q, k.shape[2], dtype)
    return scores if bias is None else scores + bias


def forward_math(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, offset: int
) -> tuple[Tensor, Tensor]:
    """Compute attention by plain arithmetic, in at least float32; right for every argument."""
    dtype = lse_dtype(q.dtype)
    scores = _scores(q, k, mask, causal, scale, offset, dtype)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    out = torch.matmul(weights, repeat_heads(v, q.shape[1]).to(dtype))
    return in_rows(out.to(q.dtype)), lse


def backward_math(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, causal: bool,
    scale: float, offset: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of attention by plain arithmetic, in at least float32."""
    dtype, heads = lse_dtype(q.dtype), q.shape[1]
    scores = _scores(q, k, mask, causal, scale, offset, dtype)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    grad = grad.to(dtype)
    dv = torch.matmul(weights.transpose(-1, -2), grad)
    dweights = torch.matmul(grad, repeat_heads(v, heads).to(dtype).transpose(-1, -2))
    dscores = weights * (dweights - (grad * out.to(dtype)).sum(-1, keepdim=True)) * scale
    dq = torch.matmul(dscores, repeat_heads(k, heads).to(dtype))
    dk = torch.matmul(dscores.transpose(-1, -2), q.to(dtype))
    return in_rows(dq.to(q.dtype)), in_rows(sum_heads(dk, k)), in_rows(sum_heads(dv, v))


def _plain_causal(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, offset: int) -> bool:
    return causal and mask is None and offset == 0 and q.shape[2] == k.shape[2]


def _flash_fits_cpu(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return q.shape[-1] == v.shape[-1] and q.numel() > 0 and k.numel() > 0 and q.dtype != torch.float16


def forward_cpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, offset: int
) -> tuple[Tensor, Tensor]:
    """Run the CPU flash kernel, with causality as a mask unless the kernel's own is meant."""
    if not _flash_fits_cpu(q, k, v):
        return forward_math(q, k, v, mask, causal, scale, offset)
    plain = _plain_causal(q, k, mask, causal, offset)
    bias = None if plain else additive_mask(mask, causal, offset, q, k.shape[2], q.dtype)
    heads = q.shape[1]
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, repeat_heads(k, heads), repeat_heads(v, heads), 0.0, plain, attn_mask=bias, scale=scale
    )
    return in_rows(out), lse.contiguous()


def backward_cpu(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, causal: bool,
    scale: float, offset: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Run the backward of the CPU flash kernel under the same conditions as ``forward_cpu``."""
    if not _flash_fits_cpu(q, k, v):
        return backward_math(grad, q, k, v, out, lse, mask, causal, scale, offset)
    plain = _plain_causal(q, k, mask, causal, offset)
    bias = None if plain else additive_mask(mask, causal, offset, q, k.shape[2], q.dtype)
    heads = q.shape[1]
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        grad, q, repeat_heads(k, heads), repeat_heads(v, heads), out, lse, 0.0, plain, attn_mask=bias, scale=scale
    )
    return in_rows(dq), in_rows(sum_heads(dk, k)), in_rows(sum_heads(dv, v))


def _flash_fits_cuda(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, offset: int) -> bool:
    width = q.shape[-1]
    legal = q.dtype in (torch.float16, torch.bfloat16) and width == v.shape[-1] and width % 8 == 0 and width <= 256
    legal = legal and q.numel() > 0 and k.numel() > 0 and torch.cuda.get_device_capability(q.device) >= (8, 0)
    return legal and mask is None and (not causal or _plain_causal(q, k, mask, causal, offset))


def forward_cuda(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, offset: int
) -> tuple[Tensor, Tensor]:
    """Run the CUDA flash kernel where it means the same."""
    if not _flash_fits_cuda(q, k, v, mask, causal, offset):
        return forward_math(q, k, v, mask, causal, scale, offset)
    heads = q.shape[1]
    out, lse, *_ = aten._scaled_dot_product_flash_attention.default(
        q, repeat_heads(k, heads), repeat_heads(v, heads), 0.0, causal, False, scale=scale
    )
    return in_rows(out), lse.contiguous()


def backward_cuda(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, causal: bool,
    scale: float, offset: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Run the backward of the CUDA flash kernel under the same conditions as ``forward_cuda``."""
    if not _flash_fits_cuda(q, k, v, mask, causal, offset):
        return backward_math(grad, q, k, v, out, lse, mask, causal, scale, offset)
    heads = q.shape[1]
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty((), dtype=torch.uint64, device=q.device)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward.default(
        grad, q, repeat_heads(k, heads), repeat_heads(v, heads), out, lse, None, None, q.shape[2], k.shape[2],
        0.0, causal, seed, unused, scale=scale,
    )  # fmt: skip
    return in_rows(dq), in_rows(sum_heads(dk, k)), in_rows(sum_heads(dv, v))
