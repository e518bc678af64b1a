"""Batch norms that average their statistics over all batches: the count is a value, and their forward reads it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def average_by_tensors(model: nn.Module) -> None:
    """Give every such module a forward of its own, which divides by the count as a tensor.

    It is an attribute of the module; whoever traces puts modules back as they were.
    """
    for module in model.modules():
        if type(module).forward is _BatchNorm.forward and module.momentum is None and module.track_running_stats:
            module.forward = partial(_forward, module)


def _forward(module: Any, input: Tensor) -> Tensor:
    if not module.training or module.num_batches_tracked is None:
        return type(module).forward(module, input)  # type: ignore[no-any-return]
    module._check_input_dim(input)
    module.num_batches_tracked.add_(1)
    kept = (module.running_mean, module.running_var)
    mean, variance = (statistic.clone() for statistic in kept)
    result = F.batch_norm(input, mean, variance, module.weight, module.bias, True, 1.0, module.eps)
    for statistic, now in zip(kept, (mean, variance)):
        share = 1.0 / module.num_batches_tracked.to(statistic.dtype)
        statistic.copy_(statistic * (1.0 - share) + now * share)
    return result
