"""Kernels of the ops in ``norms``: torch's own for batch norms on the CPU, plain arithmetic where they don't fit.

On the CPU torch's batch norms are called for what they do in one pass over memory: to scale and shift channels, and to
sum a gradient with and without what it is multiplied by. Its statistics are slower there than sums are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..torch_private import suggest_memory_format

aten = torch.ops.aten

ON_HOST = ("cpu", "meta")
"""Devices whose memory is followed op by op; what runs on meta tensors allocates as the CPU does."""


def statistic_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the statistics of a tensor of ``dtype``: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def along(values: Tensor, x: Tensor) -> Tensor:
    """Return one value a channel in a shape that broadcasts over ``x``."""
    return values.view((-1, *(1,) * (x.dim() - 2)))


def moments(x: Tensor) -> Tensor:
    """Sum over all but the channels: around their mean first, then moved to zero where there are digits for it."""
    wide, dims, rows = x.to(statistic_dtype(x.dtype)), [0, *range(2, x.dim())], _rows(x)
    if not x.numel():
        return x.new_zeros((2, x.shape[1]), dtype=torch.float64)
    if x.device.type in ON_HOST:
        mean = wide.sum(dims).mul_(1.0 / rows)
        spread = (wide - along(mean, x)).square_().sum(dims)
    else:
        spread, mean = torch.var_mean(wide, dims, correction=0)
        spread = spread * rows
    both = torch.stack((mean, spread)).double()
    first, second = both.unbind()
    second.addcmul_(first, first, value=rows)
    first.mul_(rows)
    return both


def moments_math(x: Tensor) -> Tensor:
    """Compute the same without writing into anything."""
    wide, dims, rows = x.to(statistic_dtype(x.dtype)), [0, *range(2, x.dim())], _rows(x)
    if not x.numel():
        return x.new_zeros((2, x.shape[1]), dtype=torch.float64)
    spread, mean = torch.var_mean(wide, dims, correction=0)
    spread, mean = spread.double(), mean.double()
    return torch.stack((mean * rows, (spread + mean * mean) * rows))


def normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    """Normalise into new memory, which lies as torch's batch norms leave it."""
    out = torch.empty_like(x, memory_format=suggest_memory_format(x))
    return _normalise_into(out, x, weight, bias, mean, variance, eps)


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


def normalise_sums(grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Sum a gradient over all but the channels, times what was normalised and by itself."""
    if not x.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean)
    grad, x = grad.to(mean.dtype), x.to(mean.dtype)
    if x.device.type == "meta":  # torch makes room there for the gradient that is not asked for
        return torch.empty_like(mean), torch.empty_like(mean)
    _, dot, total = aten.native_batch_norm_backward.default(
        grad, x, None, None, None, mean, scale, True, 0.0, [False, True, True]
    )
    return dot, total


def normalise_sums_math(grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the same by plain arithmetic."""
    grad, dims = grad.to(mean.dtype), [0, *range(2, x.dim())]
    return (grad * (x - along(mean, x))).sum(dims) * scale, grad.sum(dims)


def normalise_backward(
    x: Tensor, grad: Tensor, weight: Tensor | None, mean: Tensor, scale: Tensor, dot: Tensor, total: Tensor, count: int
) -> Tensor:
    """Return the gradient of what was normalised, in new memory."""
    out = torch.empty_like(x, memory_format=suggest_memory_format(x))
    return _backward_into(out, x, grad, weight, mean, scale, dot, total, count)


def normalise_backward_(
    x: Tensor, grad: Tensor, weight: Tensor | None, mean: Tensor, scale: Tensor, dot: Tensor, total: Tensor, count: int
) -> Tensor:
    """Write the gradient of what was normalised over it."""
    return _backward_into(x, x, grad, weight, mean, scale, dot, total, count)


def normalise_backward_math(
    x: Tensor, grad: Tensor, weight: Tensor | None, mean: Tensor, scale: Tensor, dot: Tensor, total: Tensor, count: int
) -> Tensor:
    """Compute the same by plain arithmetic."""
    slope = scale if weight is None else scale * weight
    normal = (x - along(mean, x)) * along(scale * dot * (1.0 / count), x)
    out = ((grad - normal - along(total * (1.0 / count), x)) * along(slope, x)).to(x.dtype)
    return out.contiguous(memory_format=suggest_memory_format(x))


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
    weight, bias = (None if given is None else given.to(mean.dtype) for given in (weight, bias))
    unused = mean.new_empty(0), mean.new_empty(0)
    torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, out=(out, *unused))
    return out


def _backward_into(
    out: Tensor, x: Tensor, grad: Tensor, weight: Tensor | None, mean: Tensor, scale: Tensor, dot: Tensor,
    total: Tensor, count: int,
) -> Tensor:  # fmt: skip
    """Write ``slope (grad - total / count - (x - mean) scale dot / count)``: a batch norm and a product."""
    if not x.numel():
        return out
    if x.dtype != mean.dtype:  # rounded once, at the end
        return out.copy_(normalise_backward_math(x, grad, weight, mean, scale, dot, total, count))
    slope = scale if weight is None else scale * weight
    part = slope * (-1.0 / count)
    _normalise_into(out, x, part * dot, part * total, mean, scale.pow(-2), 0.0)
    return out.addcmul_(grad, along(slope, x))
