"""Kernels of the ops in ``norms``: torch's own for batch norms on the CPU, plain arithmetic where they don't fit.

On the CPU torch's batch norms are called for what they do in one pass over memory: to scale and shift channels, and to
sum a gradient with and without what it is multiplied by. Its statistics are slower there than sums are.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from ..torch_private import suggest_memory_format

aten = torch.ops.aten

ON_HOST = ("cpu", "meta")
"""Devices whose memory is followed op by op; what runs on meta tensors allocates as the CPU does."""


def statistic_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the statistics of a tensor of ``dtype``: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a dtype; one that has it without a call."""
    return x if x.dtype == dtype else x.to(dtype)


def along(values: Tensor, x: Tensor) -> Tensor:
    """Return one value a channel in a shape that broadcasts over ``x``."""
    return values.view((-1, *(1,) * (x.dim() - 2)))


def moments(x: Tensor) -> Tensor:
    """Sum an input and its square over all but the channels, without losing digits to a mean far from zero."""
    if not x.numel():
        return x.new_zeros((2, x.shape[1]), dtype=torch.float64)
    wide, rows = as_dtype(x, statistic_dtype(x.dtype)), _rows(x)
    if _sums_are_quick(wide):
        first, square = _sum_in_one_pass(wide)
        if _keeps_digits(square, torch.addcmul(square, first, first, value=-1.0 / rows)):
            return torch.stack((first, square)).double()
    both = torch.stack(_spread(wide)).double()
    mean, variance = both.unbind()
    variance.addcmul_(mean, mean)
    return both.mul_(rows)


def statistics(moments: Tensor, count: int, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, variance, and one over the deviation."""
    mean, square = (moments * (1.0 / count if count else math.nan)).unbind()
    variance = torch.addcmul(square, mean, mean, value=-1.0).clamp_min_(0.0).to(dtype)
    return mean.to(dtype), variance, torch.rsqrt_(variance + eps)


def statistics_of(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, variance, and one over the deviation of all there is; of what is not empty."""
    wide, rows = as_dtype(x, statistic_dtype(x.dtype)), _rows(x)
    if _sums_are_quick(wide):
        first, square = _sum_in_one_pass(wide)
        spread = torch.addcmul(square, first, first, value=-1.0 / rows)
        if _keeps_digits(square, spread):
            variance = spread.mul_(1.0 / rows)
            return first.mul_(1.0 / rows), variance, torch.rsqrt_(variance + eps)
    mean, variance = _spread(wide)
    return mean, variance, torch.rsqrt_(variance + eps)


FAR = 64.0
"""The square of a mean over the variance, beyond which a sum of squares loses too many digits: two of seven."""


def _sums_are_quick(x: Tensor) -> bool:
    """Tell whether torch has something slower for the statistics, as on the CPU where channels do not lie together."""
    return x.device.type in ON_HOST and not _channels_lie_together(x)


def _channels_lie_together(x: Tensor) -> bool:
    last = suggest_memory_format(x)
    return last is not torch.contiguous_format and x.is_contiguous(memory_format=last)


def _sum_in_one_pass(x: Tensor) -> tuple[Tensor, Tensor]:
    """Sum an input and its square by the kernel that sums a gradient and its product with the input: it is both."""
    zero = x.new_zeros(x.shape[1])
    if x.device.type == "meta":
        return torch.empty_like(zero), torch.empty_like(zero)
    _, square, first = aten.native_batch_norm_backward(
        x, x, None, zero, zero, None, None, False, 1.0, [False, True, True]
    )
    return first, square


def _keeps_digits(square: Tensor, spread: Tensor) -> bool:
    """Tell whether no channel has a mean far from zero: the sum of squares is not far above that around the mean."""
    least = torch.sub(spread, square, alpha=1.0 / (FAR + 1.0)).min()
    return least.is_meta or float(least) >= 0.0


def _spread(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance by way of the mean."""
    dims = _all_but_channels(x)
    if x.device.type not in ON_HOST:
        variance, mean = torch.var_mean(x, dims, correction=0)
        return mean, variance
    if not _channels_lie_together(x):
        mean = x.mean(dims)
        return mean, (x - along(mean, x)).square_().mean(dims)
    if x.device.type == "meta":
        return x.new_empty(x.shape[1]), x.new_empty(x.shape[1])
    mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
    return mean, variance


def moments_math(x: Tensor) -> Tensor:
    """Compute the same without writing into anything."""
    rows = _rows(x)
    if not x.numel():
        return x.new_zeros((2, x.shape[1]), dtype=torch.float64)
    wide = x.to(statistic_dtype(x.dtype))
    spread, mean = torch.var_mean(wide, _all_but_channels(x), correction=0)
    spread, mean = spread.double(), mean.double()
    return torch.stack((mean * rows, (spread + mean * mean) * rows))


def statistics_math(moments: Tensor, count: int, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the same without writing into anything."""
    mean, square = (moments * (1.0 / count if count else math.nan)).unbind()
    variance = (square - mean * mean).clamp_min(0.0).to(dtype)
    return mean.to(dtype), variance, torch.rsqrt(variance + eps)


def normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    """Normalise into new memory, which lies as torch's batch norms leave it."""
    if x.device.type != "cpu" or not x.numel():
        return _normalise_into(_beside(x), x, weight, bias, mean, variance, eps)
    weight, bias = _affine(weight, mean.dtype), _affine(bias, mean.dtype)
    return torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0]


def normalise_(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    """Normalise in place."""
    return _normalise_into(x, x, weight, bias, mean, variance, eps)


def normalise_math(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    """Compute the same by plain arithmetic."""
    slope, offset = _line(weight, bias, mean, variance, eps)
    out = (x * along(slope, x) + along(offset, x)).to(x.dtype)
    return out.contiguous(memory_format=suggest_memory_format(x))


def normalise_sums(grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Sum a gradient over all but the channels, times what was normalised and by itself."""
    if not x.numel():
        return mean.new_zeros((2, *mean.shape))
    grad, x = as_dtype(grad, mean.dtype), as_dtype(x, mean.dtype)
    if x.device.type == "meta":  # torch makes room there for the gradient that is not asked for
        return torch.stack((torch.empty_like(mean), torch.empty_like(mean)))
    _, dot, total = aten.native_batch_norm_backward(
        grad, x, None, None, None, mean, scale, True, 0.0, [False, True, True]
    )
    return torch.stack((dot, total))


def normalise_sums_math(grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Compute the same by plain arithmetic."""
    grad, dims = grad.to(mean.dtype), _all_but_channels(x)
    return torch.stack(((grad * (x - along(mean, x))).sum(dims) * scale, grad.sum(dims)))


def normalise_backward(
    x: Tensor, grad: Tensor, weight: Tensor | None, mean: Tensor, scale: Tensor, sums: Tensor, count: int
) -> Tensor:
    """Return the gradient of what was normalised, in new memory."""
    return _backward_into(_beside(x), x, grad, weight, mean, scale, sums, count)


def normalise_backward_(
    x: Tensor, grad: Tensor, weight: Tensor | None, mean: Tensor, scale: Tensor, sums: Tensor, count: int
) -> Tensor:
    """Write the gradient of what was normalised over it."""
    return _backward_into(x, x, grad, weight, mean, scale, sums, count)


def normalise_backward_math(
    x: Tensor, grad: Tensor, weight: Tensor | None, mean: Tensor, scale: Tensor, sums: Tensor, count: int
) -> Tensor:
    """Compute the same by plain arithmetic."""
    slope = scale if weight is None else scale * weight
    dot, total = sums.unbind()
    normal = (x - along(mean, x)) * along(scale * dot * (1.0 / count), x)
    out = ((grad - normal - along(total * (1.0 / count), x)) * along(slope, x)).to(x.dtype)
    return out.contiguous(memory_format=suggest_memory_format(x))


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _beside(x: Tensor) -> Tensor:
    """Return new memory that lies as torch's batch norms leave it."""
    return torch.empty_like(x, memory_format=suggest_memory_format(x))


def _affine(values: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if values is None else as_dtype(values, dtype)


@cache
def _nothing(dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype)


def _rows(x: Tensor) -> int:
    return x.numel() // max(1, x.shape[1])


def _line(
    weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return what channels are multiplied by, and what is then added."""
    slope = torch.rsqrt(variance + eps)
    slope = slope if weight is None else slope * weight
    offset = -mean * slope
    return slope, offset if bias is None else offset + bias


def _normalise_into(
    out: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    if not x.numel():
        return out
    if x.device.type not in ON_HOST:
        slope, offset = _line(weight, bias, mean, variance, eps)
        return torch.addcmul(along(offset, x), x, along(slope, x), out=out)
    weight, bias, unused = _affine(weight, mean.dtype), _affine(bias, mean.dtype), _nothing(mean.dtype)
    if x.device.type == "meta":
        return out
    torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, out=(out, unused, unused))
    return out


def _backward_into(
    out: Tensor, x: Tensor, grad: Tensor, weight: Tensor | None, mean: Tensor, scale: Tensor, sums: Tensor,
    count: int,
) -> Tensor:  # fmt: skip
    """Write ``slope (grad - total / count - (x - mean) scale dot / count)``: a batch norm and a product."""
    if not x.numel():
        return out
    if x.dtype != mean.dtype:  # rounded once, at the end
        return out.copy_(normalise_backward_math(x, grad, weight, mean, scale, sums, count))
    slope = scale if weight is None else scale * weight
    dot, total = (sums * (slope * (-1.0 / count))).unbind()
    _normalise_into(out, x, dot, total, mean, scale.pow(-2), 0.0)
    return out.addcmul_(grad, along(slope, x))
