"""Pooling to one number a channel is traced as a mean: the kernel for it answers in a view with strides of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .trace_flat import FlatViews


def _to_one(dims: int) -> Callable[..., Any]:
    def adaptive_avg_pool(flat: FlatViews, input: Tensor, output_size: Any) -> Any:
        sizes = [output_size] * dims if isinstance(output_size, int) else list(output_size)
        ones = all(size == 1 or (size is None and whole == 1) for size, whole in zip(sizes, input.shape[-dims:]))
        if not ones or input.dim() < dims + 1:
            return NotImplemented
        return input.mean(list(range(-dims, 0)), keepdim=True)

    return adaptive_avg_pool


REWRITES: dict[Any, Callable[..., Any]] = {
    torch.adaptive_avg_pool1d: _to_one(1),
    torch._C._nn.adaptive_avg_pool2d: _to_one(2),
    torch._C._nn.adaptive_avg_pool3d: _to_one(3),
}
"""Torch function -> its rewrite."""
