"""Batch norms in parts: what is summed over the batch, and what is done to each channel with the sums.

``x`` is ``[N, C, ...]``. ``moments`` are the sums of ``x`` and of its square over all but the channels, ``[2, C]`` in
float64, from which a variance can be read without losing the digits of a float32 input; those of pieces add up to those
of the whole. ``statistics`` are what they say of ``count`` numbers a channel: mean, variance, and ``scale``, one over
the deviation. ``normalise`` scales and shifts channels by given statistics. ``normalise_sums`` are the sums of a
gradient times what was normalised, and of the gradient alone, ``[2, C]``; ``normalise_backward`` is the gradient of an
``x`` whose statistics were taken over ``count`` numbers a channel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..torch_private import suggest_memory_format
from . import norm_kernels
from .library import LIBRARY

_NORMALISE = "Tensor? weight, Tensor? bias, Tensor mean, Tensor variance, float eps) -> Tensor"
_BACKWARD = "Tensor grad, Tensor? weight, Tensor mean, Tensor scale, Tensor sums, int count) -> Tensor"

for schema in (
    "moments(Tensor x) -> Tensor",
    "statistics(Tensor moments, int count, float eps, ScalarType dtype)"
    " -> (Tensor mean, Tensor variance, Tensor scale)",
    f"normalise(Tensor x, {_NORMALISE}",
    f"normalise_(Tensor(a!) x, {_NORMALISE}(a!)",
    "normalise_sums(Tensor grad, Tensor x, Tensor mean, Tensor scale) -> Tensor",
    f"normalise_backward(Tensor x, {_BACKWARD}",
    f"normalise_backward_(Tensor(a!) x, {_BACKWARD}(a!)",
):
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))


def _like(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x, memory_format=suggest_memory_format(x))


def _itself(x: Tensor, *rest: Any) -> Tensor:
    return x


def _moments(x: Tensor) -> Tensor:
    return x.new_empty((2, x.shape[1]), dtype=torch.float64)


def _statistics(moments: Tensor, count: int, eps: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(moments.new_empty(moments.shape[1], dtype=dtype) for _ in range(3))


def _sums(grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    return mean.new_empty((2, *mean.shape))


_FAKES: dict[str, Callable[..., Any]] = {
    "moments": _moments,
    "statistics": _statistics,
    "normalise": _like,
    "normalise_": _itself,
    "normalise_sums": _sums,
    "normalise_backward": _like,
    "normalise_backward_": _itself,
}
for name, fake in _FAKES.items():
    torch.library.register_fake(f"autopar::{name}", fake, lib=LIBRARY)
    torch.library.impl(f"autopar::{name}", ("cpu", "cuda"), getattr(norm_kernels, name), lib=LIBRARY)

_OPS: Any = torch.ops.autopar

KERNELS: dict[Any, Callable[..., Any]] = {getattr(_OPS, name).default: getattr(norm_kernels, name) for name in _FAKES}
"""Op -> its kernel in Python."""

MATH: dict[Any, Callable[..., Any]] = {
    _OPS.moments.default: norm_kernels.moments_math,
    _OPS.statistics.default: norm_kernels.statistics_math,
    _OPS.normalise.default: norm_kernels.normalise_math,
    _OPS.normalise_sums.default: norm_kernels.normalise_sums_math,
    _OPS.normalise_backward.default: norm_kernels.normalise_backward_math,
}
"""Op -> the same in plain arithmetic, for a compiler."""
