"""Softmax and the losses on it are traced as maxima, sums and gathers, so that each can be split over its classes.

Their gradients are written out: they read what the forward leaves anyway, and no reduction hides in them. Arithmetic on
16 bit floats is done in float32, and results are contiguous, as those of torch's own kernels are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .trace_flat import FlatViews


def widen(x: Tensor) -> Tensor:
    """Return a 16 bit float tensor in float32, any other as it is."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        wide = widen(x)
        powers = torch.exp(wide - wide.amax(dim, keepdim=True))
        result = (powers / powers.sum(dim, keepdim=True)).to(x.dtype).contiguous()
        ctx.dim = dim
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (result,) = ctx.saved_tensors
        weighted = widen(grad) * widen(result)
        back = weighted - widen(result) * weighted.sum(ctx.dim, keepdim=True)
        return back.to(result.dtype), None


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        wide = widen(x)
        shifted = wide - wide.amax(dim, keepdim=True)
        result = (shifted - torch.log(torch.exp(shifted).sum(dim, keepdim=True))).to(x.dtype).contiguous()
        ctx.dim = dim
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (result,) = ctx.saved_tensors
        wide = widen(grad)
        back = wide - torch.exp(widen(result)) * wide.sum(ctx.dim, keepdim=True)
        return back.to(result.dtype), None


class _PickedNll(torch.autograd.Function):
    """Negative log probability of the classes in ``index`` (which has size 1 along ``dim``), in at least float32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, index: Tensor, dim: int) -> Tensor:
        wide = widen(logits)
        shifted = wide - wide.amax(dim, keepdim=True)
        picked = torch.gather(shifted, dim, index)
        powers = torch.exp(shifted)  # the last to read them, so that it may take their memory
        total = powers.sum(dim, keepdim=True)
        ctx.dim, ctx.dtype = dim, logits.dtype
        ctx.save_for_backward(powers, total, index)
        return torch.log(total) - picked

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        powers, total, index = ctx.saved_tensors
        back = (powers * (grad / total)).scatter_add(ctx.dim, index, -grad)
        return back.to(ctx.dtype), None, None


def softmax_of(x: Tensor, dim: int) -> Tensor:
    """Return the softmax of ``x`` along ``dim``."""
    result: Tensor = _Softmax.apply(x, dim % max(x.dim(), 1))
    return result


def log_softmax_of(x: Tensor, dim: int) -> Tensor:
    """Return the logarithm of the softmax of ``x`` along ``dim``."""
    result: Tensor = _LogSoftmax.apply(x, dim % max(x.dim(), 1))
    return result


def softmax(
    flat: FlatViews, input: Tensor, dim: Any = None, *rest: Any, dtype: torch.dtype | None = None, **_: Any
) -> Any:
    """Trace ``softmax`` in all its spellings."""
    return _on_dim(softmax_of, input, dim, dtype or _dtype_of(rest))


def log_softmax(
    flat: FlatViews, input: Tensor, dim: Any = None, *rest: Any, dtype: torch.dtype | None = None, **_: Any
) -> Any:
    """Trace ``log_softmax`` in all its spellings."""
    return _on_dim(log_softmax_of, input, dim, dtype or _dtype_of(rest))


def _dtype_of(rest: tuple[Any, ...]) -> torch.dtype | None:
    return next((item for item in rest if isinstance(item, torch.dtype)), None)


def _on_dim(function: Any, input: Tensor, dim: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(dim, int) or input.dim() == 0:
        return NotImplemented
    x = input if dtype is None else input.to(dtype)
    return function(x, dim) if x.is_floating_point() else NotImplemented


def cross_entropy(
    flat: FlatViews,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Trace ``F.cross_entropy``; the mean is over the elements that count in the whole batch."""
    if size_average is not None or reduce is not None or reduction not in ("none", "mean", "sum"):
        return NotImplemented
    if input.shape == target.shape and target.is_floating_point():
        return _from_probabilities(input, target, weight, reduction, label_smoothing)
    if not _classes_fit(input, target):
        return NotImplemented
    dim = 1 if input.dim() > 1 else 0
    whole, classes = flat.whole(input), flat.whole(target)
    if reduction != "none" and whole and classes and whole[0].shape[:-1] == classes[0].shape and input.dim() == 2:
        input, target, dim = whole[0], classes[0], whole[0].dim() - 1
    if torch.is_autocast_enabled("cpu"):
        input = input.float()
    if weight is None and label_smoothing == 0.0:
        return _plain_loss(input, target, dim, ignore_index, reduction)
    return _weighted_loss(log_softmax_of(input, dim), target, dim, weight, ignore_index, reduction, label_smoothing)


def nll_loss(
    flat: FlatViews,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """Trace ``F.nll_loss`` on log probabilities."""
    if size_average is not None or reduce is not None or reduction not in ("none", "mean", "sum"):
        return NotImplemented
    if not _classes_fit(input, target):
        return NotImplemented
    dim = 1 if input.dim() > 1 else 0
    return _weighted_loss(input, target, dim, weight, ignore_index, reduction, 0.0)


def _classes_fit(input: Tensor, target: Tensor) -> bool:
    if input.dim() == 0 or target.is_floating_point() or not input.is_floating_point():
        return False
    expected = (*input.shape[:1], *input.shape[2:]) if input.dim() > 1 else ()
    return tuple(target.shape) == tuple(expected)


def _safe_target(target: Tensor, dim: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return what is ignored, and the target as an index with 0 there; both with a dim of size 1 at ``dim``."""
    target = target.long().unsqueeze(dim)
    ignored = target == ignore_index
    return ignored, target.masked_fill(ignored, 0)


def _plain_loss(input: Tensor, target: Tensor, dim: int, ignore_index: int, reduction: str) -> Tensor:
    ignored, index = _safe_target(target, dim, ignore_index)
    each: Tensor = _PickedNll.apply(input, index, dim)
    each = each.masked_fill(ignored, 0.0)
    if reduction == "none":
        return each.squeeze(dim).to(input.dtype)
    total = each.sum()
    if reduction == "mean":
        total = total / ignored.logical_not().sum().to(total.dtype)
    return total.to(input.dtype)


def _weighted_loss(
    log_probs: Tensor,
    target: Tensor,
    dim: int,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    smoothing: float,
) -> Tensor:
    ignored, index = _safe_target(target, dim, ignore_index)
    wide = widen(log_probs)
    share = ignored.logical_not().to(wide.dtype)
    each = -torch.gather(wide, dim, index)
    if weight is not None:
        share = share * weight.to(wide.dtype)[index]
        each = each * weight.to(wide.dtype)[index]
    each = each.masked_fill(ignored, 0.0)
    if smoothing > 0.0:
        spread = -wide if weight is None else -wide * _along(weight.to(wide.dtype), dim, wide.dim())
        even = spread.sum(dim, keepdim=True).masked_fill(ignored, 0.0)
        each = each * (1.0 - smoothing) + even * (smoothing / log_probs.shape[dim])
    if reduction == "none":
        return each.squeeze(dim).to(log_probs.dtype)
    total = each.sum()
    if reduction == "mean":
        total = total / share.sum()
    return total.to(log_probs.dtype)


def _along(weight: Tensor, dim: int, dims: int) -> Tensor:
    return weight.reshape([-1 if d == dim else 1 for d in range(dims)])


def _from_probabilities(
    input: Tensor, target: Tensor, weight: Tensor | None, reduction: str, smoothing: float
) -> Tensor:
    dim = 1 if input.dim() > 1 else 0
    if smoothing > 0.0:
        target = target * (1.0 - smoothing) + smoothing / input.shape[dim]
    each = -widen(log_softmax_of(input, dim)) * widen(target)
    if weight is not None:
        each = each * _along(weight.to(each.dtype), dim, each.dim())
    each = each.sum(dim)
    if reduction != "none":
        count = max(input.numel() // input.shape[dim], 1)
        each = each.sum() * (1.0 / count) if reduction == "mean" else each.sum()
    return each.to(input.dtype)


REWRITES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.softmax, Tensor.softmax, F.softmax, torch.special.softmax), softmax),
    **dict.fromkeys((torch.log_softmax, Tensor.log_softmax, F.log_softmax, torch.special.log_softmax), log_softmax),
    F.cross_entropy: cross_entropy,
    F.nll_loss: nll_loss,
}
"""Torch function -> its rewrite."""
