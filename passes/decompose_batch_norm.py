"""Batch norms as sums over the batch and what is done to each channel with them, so that they can be split.

A split over the batch or over space makes the sums partial, and their reduction is what synchronises the statistics:
one in the forward (``moments``), one in the backward (``normalise_sums``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .ops.norm_kernels import along, statistic_dtype
from .torch_private import suggest_memory_format
from .trace_loss import widen

aten = torch.ops.aten
_OPS: Any = torch.ops.autopar

Results = tuple[Tensor, ...]


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return what is normalised, the mean and one over the deviation, and the new running statistics."""
    if not training:
        assert running_mean is not None and running_var is not None
        mean, variance = (given.to(statistic_dtype(x.dtype)) for given in (running_mean, running_var))
        result = _OPS.normalise.default(x, weight, bias, mean, variance, eps)
        return result, x.new_zeros((0,)), x.new_zeros((0,)), running_mean, running_var
    count = x.numel() // x.shape[1]
    mean, variance, scale = _OPS.statistics.default(_OPS.moments.default(x), count, eps, statistic_dtype(x.dtype))
    result = _OPS.normalise.default(x, weight, bias, mean, variance, eps)
    if running_mean is not None:
        running_mean = torch.lerp(running_mean, mean.to(running_mean.dtype), momentum)
    if running_var is not None:
        unbiased = variance * (count / (count - 1) if count > 1 else math.nan)
        running_var = torch.lerp(running_var, unbiased.to(running_var.dtype), momentum)
    return result, mean, scale, running_mean, running_var


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Results:
    """Write a batch norm that moves its running statistics itself."""
    *results, mean, variance = _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)
    if training:
        for kept, now in ((running_mean, mean), (running_var, variance)):
            if kept is not None and now is not None:
                kept.copy_(now)
    return tuple(results)


def batch_norm_functional(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor | None, ...]:
    """Write a batch norm that returns its new running statistics."""
    return _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)


def batch_norm_of_batch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> Results:
    """Write a batch norm without running statistics."""
    return _batch_norm(x, weight, bias, None, None, training, momentum, eps)[:3]


def batch_norm_with_given(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> Results:
    """Write a batch norm by running statistics."""
    return _batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps)[:3]


def batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Write the gradients of a batch norm: those of weight and bias are sums that the one of its input needs too."""
    mean, scale = save_mean, save_invstd
    if not train:
        assert running_mean is not None and running_var is not None
        mean, variance = (given.to(statistic_dtype(x.dtype)) for given in (running_mean, running_var))
        scale = torch.rsqrt(variance + eps)
    assert mean is not None and scale is not None
    dtype = x.dtype if weight is None else weight.dtype
    dx, sums = None, None
    if output_mask[1] or output_mask[2] or train:
        sums = _OPS.normalise_sums.default(grad, x, mean, scale)
    if output_mask[0] and train:
        dx = _OPS.normalise_backward.default(x, grad, weight, mean, scale, sums, x.numel() // x.shape[1])
    elif output_mask[0]:
        slope = scale if weight is None else scale * weight
        dx = (widen(grad) * along(slope, x)).to(x.dtype).contiguous(memory_format=suggest_memory_format(x))
    of_weight, of_bias = (
        sums.select(0, index).to(dtype) if wanted and sums is not None else None
        for index, wanted in enumerate(output_mask[1:])
    )
    return dx, of_weight, of_bias


BATCH_NORMS: dict[Any, Callable[..., Any]] = {
    aten.native_batch_norm.default: batch_norm,
    aten._native_batch_norm_legit.default: batch_norm,
    aten._native_batch_norm_legit.no_stats: batch_norm_of_batch,
    aten._native_batch_norm_legit_functional.default: batch_norm_functional,
    aten._native_batch_norm_legit_no_training.default: batch_norm_with_given,
    aten.native_batch_norm_backward.default: batch_norm_backward,
}
"""ATen op -> how it is written."""
