"""Matrix functions that look at their results to raise, and covariances, which look at the number of observations.

A program can't raise from inside: where torch would (a singular matrix, one that is not positive definite), the result
is NaN. What torch checks further inside is solved by a factor with a zero on its diagonal, which leaves numbers that
are not finite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.errors import CaptureError

from . import torch_private
from .trace_flat import FlatViews


def _or_nan(result: Tensor, info: Tensor) -> Tensor:
    """Return ``result`` where ``info`` is 0, NaN where the factorisation failed; both have the same leading dims."""
    failed = info.ne(0)
    return result.masked_fill(failed[(..., *[None] * (result.dim() - info.dim()))], float("nan"))


def inv(flat: FlatViews, A: Tensor, *, out: Tensor | None = None) -> Any:
    """Trace ``torch.linalg.inv``."""
    return NotImplemented if out is not None else _or_nan(*torch.linalg.inv_ex(A))


def _inverse(flat: FlatViews, input: Tensor, *, out: Tensor | None = None) -> Any:
    return inv(flat, input, out=out)


def solve(flat: FlatViews, A: Tensor, B: Tensor, *, left: bool = True, out: Tensor | None = None) -> Any:
    """Trace ``torch.linalg.solve``."""
    return NotImplemented if out is not None else _or_nan(*torch.linalg.solve_ex(A, B, left=left))


def cholesky(flat: FlatViews, A: Tensor, *, upper: bool = False, out: Tensor | None = None) -> Any:
    """Trace ``torch.linalg.cholesky``."""
    return NotImplemented if out is not None else _or_nan(*torch.linalg.cholesky_ex(A, upper=upper))


def _old_cholesky(flat: FlatViews, input: Tensor, upper: bool = False, *, out: Tensor | None = None) -> Any:
    return cholesky(flat, input, upper=upper, out=out)


def cov(
    flat: FlatViews,
    input: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Any:
    """Trace ``torch.cov`` of rows that all count the same."""
    if fweights is not None or aweights is not None or input.dim() > 2 or input.numel() == 0:
        return NotImplemented
    if not (input.dtype.is_floating_point or input.dtype.is_complex):
        return NotImplemented
    rows = input if input.dim() == 2 else input.reshape(1, -1)
    free = rows.shape[1] - correction
    centred = rows - rows.mean(1, keepdim=True)
    result = torch.matmul(centred, centred.t().conj()) * (1.0 / free if free > 0 else float("nan"))
    return result if input.dim() == 2 else result.reshape(())


def corrcoef(flat: FlatViews, input: Tensor) -> Any:
    """Trace ``torch.corrcoef``."""
    if input.dim() != 2 or not input.dtype.is_floating_point or input.shape[1] < 2:
        return NotImplemented
    covariance = cov(flat, input)
    deviation = covariance.diagonal().sqrt()
    return (covariance / deviation[:, None] / deviation[None]).clip(-1.0, 1.0)


def check_errors(info: Tensor, api_name: str, *, is_matrix: bool) -> None:
    """Leave out a check of a factorisation that no rewrite has seen.

    Raises:
        CaptureError: the result would be finite and wrong where torch raises.
    """
    if "cholesky" in api_name:
        raise CaptureError(
            f"{api_name} looks at its result to raise, which a compiled program can't do inside of a transform of "
            "torch.func. Take torch.linalg.cholesky_ex, which leaves the look to you, or factorise outside of it."
        )


def istft(flat: FlatViews, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Trace ``torch.istft`` without its look at the window."""
    return torch_private.istft_without_checks(input, *args, **kwargs)


REWRITES: dict[Any, Callable[..., Any]] = {
    torch.linalg.inv: inv,
    **dict.fromkeys((torch.inverse, Tensor.inverse), _inverse),
    torch.linalg.solve: solve,
    torch.linalg.cholesky: cholesky,
    **dict.fromkeys((torch.cholesky, Tensor.cholesky), _old_cholesky),
    **dict.fromkeys((torch.istft, Tensor.istft), istft),
    **dict.fromkeys((torch.cov, Tensor.cov), cov),
    **dict.fromkeys((torch.corrcoef, Tensor.corrcoef), corrcoef),
}
"""Torch function -> its rewrite."""
