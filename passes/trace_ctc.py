"""The CTC loss is traced as one op that is split over samples, and a mean over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .trace_flat import FlatViews


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, *rest: Any) -> Tensor:
        losses, slope = torch.ops.autopar.ctc.default(log_probs, *rest)
        ctx.save_for_backward(slope)
        result: Tensor = losses
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (slope,) = ctx.saved_tensors
        return (slope * grad[None, :, None], None, None, None, None, None)


def ctc_loss(
    flat: FlatViews,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Any:
    """Trace ``F.ctc_loss``; targets are rows, or all samples' one behind the other."""
    if reduction not in ("none", "mean", "sum") or log_probs.dim() not in (2, 3) or targets.is_floating_point():
        return NotImplemented
    alone = log_probs.dim() == 2
    if alone:
        log_probs, targets = log_probs.unsqueeze(1), targets.reshape(1, -1)
    lengths = [_lengths(given, log_probs) for given in (input_lengths, target_lengths)]
    each: Tensor = _Losses.apply(log_probs, targets.long(), *lengths, blank, zero_infinity)
    if reduction == "mean":
        return (each / lengths[1].clamp(min=1).to(each.dtype)).mean()
    if reduction == "sum":
        return each.sum()
    return each.squeeze(0) if alone else each


def _lengths(given: Any, like: Tensor) -> Tensor:
    tensor = given if isinstance(given, Tensor) else torch.tensor(given, device=like.device)
    return tensor.long().reshape(like.shape[1])


REWRITES: dict[Any, Callable[..., Any]] = dict.fromkeys((F.ctc_loss, torch.ctc_loss), ctc_loss)
"""Torch function -> its rewrite."""
