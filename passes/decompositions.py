"""How ATen ops that hide a matrix product or a reduction are written as ops that show it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import torch_private
from .decompose_batch_norm import BATCH_NORMS
from .trace_linalg import check_errors
from .trace_loss import widen
from .trace_random import keep_mask

aten = torch.ops.aten

_FROM_TORCH: tuple[Any, ...] = (
    aten._softmax, aten._softmax_backward_data, aten._log_softmax, aten._log_softmax_backward_data,
    aten._safe_softmax, aten.logsumexp, aten.linalg_vector_norm,
    aten.native_group_norm, aten.native_group_norm_backward,
    aten._fused_rms_norm, aten._fused_rms_norm_backward,
    aten.nll_loss_forward, aten.nll_loss_backward, aten.nll_loss2d_forward, aten.nll_loss2d_backward,
    aten.mse_loss, aten.mse_loss_backward, aten.smooth_l1_loss, aten.smooth_l1_loss_backward,
    aten.huber_loss, aten.huber_loss_backward, aten.binary_cross_entropy, aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits, aten.soft_margin_loss, aten.soft_margin_loss_backward,
    aten._euclidean_dist, aten.addr, aten.native_dropout_backward,
)  # fmt: skip


def _dims(x: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(x.dim()))
    return [d % max(x.dim(), 1) for d in ([dim] if isinstance(dim, int) else dim)] if x.dim() else []


def _count(x: Tensor, dims: Sequence[int]) -> int:
    return math.prod(x.shape[d] for d in dims)


def mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Write a mean as a sum times one over the number of elements."""
    dims = _dims(x, dim)
    wide = widen(x if dtype is None else x.to(dtype))
    if not dims:
        return wide.to(dtype or x.dtype)
    count = _count(x, dims)
    return (wide.sum(dims, keepdim) * (1.0 / count if count else math.nan)).to(dtype or x.dtype)


def var_mean(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Write a variance and a mean as two sums."""
    dims = _dims(x, dim)
    wide = widen(x)
    count = _count(x, dims)
    free = count - (1.0 if correction is None else correction)
    center = wide.sum(dims, True) * (1.0 / count if count else math.nan) if dims else wide
    spread = wide - center
    variance = spread * spread
    variance = (variance.sum(dims, keepdim) if dims else variance) * (1.0 / free if free > 0 else math.nan)
    center = center if keepdim or not dims else center.squeeze(dims)
    return variance.to(x.dtype), center.to(x.dtype)


def var(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    """Write a variance as sums."""
    return var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def std(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    """Write a standard deviation as sums and a root."""
    return var(x, dim, correction=correction, keepdim=keepdim).sqrt()


def std_mean(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Write a standard deviation and a mean as sums and a root."""
    variance, center = var_mean(x, dim, correction=correction, keepdim=keepdim)
    return variance.sqrt(), center


def _contract(equation: str) -> Callable[..., Tensor]:
    def product(a: Tensor, b: Tensor) -> Tensor:
        result: Tensor = torch.ops.autopar.contract.default(a, b, equation)
        return result

    return product


def _with_sum(equation: str) -> Callable[..., Tensor]:
    product = _contract(equation)

    def addmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        result = product(a, b)
        result = result if alpha == 1 else result * alpha
        if beta == 0:
            return result
        return result + (x if beta == 1 else x * beta)

    return addmm


def as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Any:
    """Write a look at memory as a read at indices: a rank's piece lies in memory otherwise than the whole.

    What looks past its operand, into the memory behind it, stays as it is, and is refused.
    """
    first = int(x.storage_offset()) if storage_offset is None else storage_offset
    if not _holds(x, size, stride, first):
        return NotImplemented
    flat = x.permute(_memory_order(x)).reshape(-1)
    rows = [math.prod(size[dim + 1 :]) for dim, n in enumerate(size) if n > 1]
    if rows == [step for n, step in zip(size, stride) if n > 1] and math.prod(size) == x.numel():
        return flat.reshape(size)
    return flat.index_select(0, _places(x, size, stride, first)).view(size)


def as_strided_scatter(
    x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    """Write the same of a write."""
    first = int(x.storage_offset()) if storage_offset is None else storage_offset
    if not _holds(x, size, stride, first):
        return NotImplemented
    order = _memory_order(x)
    flat = x.permute(order).reshape(-1).index_put((_places(x, size, stride, first),), source.expand(size).reshape(-1))
    return flat.view([x.shape[dim] for dim in order]).permute([order.index(dim) for dim in range(x.dim())])


def _memory_order(x: Tensor) -> list[int]:
    return sorted(range(x.dim()), key=lambda dim: (x.shape[dim] == 1, -x.stride()[dim]))


def _holds(x: Tensor, size: Sequence[int], stride: Sequence[int], first: int) -> bool:
    """Tell whether all that is looked at lies inside of an operand without gaps."""
    last = first + sum((n - 1) * step for n, step in zip(size, stride))
    return (
        _is_dense(x)
        and math.prod(size) > 0
        and 0 <= first - x.storage_offset() <= last - x.storage_offset() < x.numel()
    )


def _places(x: Tensor, size: Sequence[int], stride: Sequence[int], first: int) -> Tensor:
    """Return where in the flat operand the elements of a look at memory are, flat."""
    place = torch.full((1,) * len(size), first - int(x.storage_offset()), device=x.device)
    for dim, (n, step) in enumerate(zip(size, stride)):
        if n > 1:
            along = torch.arange(n, device=x.device) * step
            place = place + along.view([-1 if d == dim else 1 for d in range(len(size))])
    return place.expand(size).reshape(-1)


def _is_dense(x: Tensor) -> bool:
    """Tell whether the elements of a tensor fill a part of the memory without gaps, in some order of the dims."""
    expected = 1
    for step, n in sorted((x.stride(dim), x.shape[dim]) for dim in range(x.dim()) if x.shape[dim] != 1):
        if step != expected:
            return False
        expected *= n
    return x.numel() > 0


def native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Write dropout as a mask that is drawn for the whole tensor, times the input."""
    if train is False or p == 0.0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1.0:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    mask = keep_mask(x, p)
    return x * mask * (1.0 / (1.0 - p)), mask.bool()


def _in_memory_format(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with its first result lying in memory as torch's kernels leave it, not as the input lies."""

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        result, *rest = function(x, *args, **kwargs)
        return (result.contiguous(memory_format=torch_private.suggest_memory_format(x)), *rest)

    return run


def conjugate(value: Tensor | complex) -> Tensor:
    """Return the conjugate of a tensor, or of the number that torch makes of one which a model multiplies by."""
    if isinstance(value, Tensor):
        return torch.conj_physical(value)
    return torch.full((), value.conjugate(), dtype=torch.complex128)


@cache
def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """Return ATen op -> function that writes it in simpler ops."""
    table: dict[Any, Callable[..., Any]] = dict(torch_private.get_decompositions(_FROM_TORCH))
    table |= BATCH_NORMS
    table |= {
        aten.native_group_norm.default: _in_memory_format(table[aten.native_group_norm.default]),
        aten.mean.default: mean,
        aten.mean.dim: mean,
        aten.var_mean.correction: var_mean,
        aten.var.correction: var,
        aten.std.correction: std,
        aten.std_mean.correction: std_mean,
        aten.mm.default: _contract("ab,bc->ac"),
        aten.bmm.default: _contract("abc,acd->abd"),
        aten.mv.default: _contract("ab,b->a"),
        aten.dot.default: _contract("a,a->"),
        aten.addmm.default: _with_sum("ab,bc->ac"),
        aten.baddbmm.default: _with_sum("abc,acd->abd"),
        aten.addmv.default: _with_sum("ab,b->a"),
        aten.native_dropout.default: native_dropout,
        aten.as_strided.default: as_strided,
        aten.as_strided_scatter.default: as_strided_scatter,
        # A mark on a view says that it is conjugated or negated; traced code has decided by then whether it looks.
        aten._conj.default: conjugate,
        aten._neg_view.default: torch.neg,
        aten._linalg_check_errors.default: check_errors,
    }
    return table
