"""Batch norms that normalise each micro-batch by its own statistics, run eagerly: what a plan is compared with."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .copy_model import copy_model


def with_micro_batch_norms(model: nn.Module, names: Collection[str], count: int) -> nn.Module:
    """Return a copy of ``model`` whose batch norms ``names`` cut their batch into ``count`` parts in training."""
    copied = copy_model(model)
    for name in names:
        module = copied.get_submodule(name)
        kind = type(module)
        module.__class__ = type(kind.__name__, (kind,), {"forward": _forward_of(kind, count)})
    return copied


def _forward_of(kind: type[nn.Module], count: int) -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        if not self.training:
            return kind.forward(self, x)
        parts = x.chunk(count)
        if self.track_running_stats:
            _move_statistics(self, x)
        return torch.cat(
            [F.batch_norm(part, None, None, self.weight, self.bias, True, 0.0, self.eps) for part in parts]
        )

    return forward


@torch.no_grad()
def _move_statistics(module: Any, x: Tensor) -> None:
    dims = [dim for dim in range(x.dim()) if dim != 1]
    module.num_batches_tracked.add_(1)
    share = module.momentum if module.momentum is not None else 1.0 / float(module.num_batches_tracked)
    module.running_mean.lerp_(x.mean(dims), share)
    module.running_var.lerp_(x.var(dims), share)
