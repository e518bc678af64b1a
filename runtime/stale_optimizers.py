"""Catches an optimizer built before ``parallelize``: it holds the original's parameters, and would do nothing."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from autopar.errors import OptionError

_ORIGINALS: dict[int, weakref.ReferenceType[Tensor]] = {}
"""Parameters of modules that were parallelized, by id while they live."""

_watching = False


def watch_originals(model: nn.Module) -> None:
    """Remember the parameters of a module that is about to be parallelized."""
    global _watching
    for parameter in model.parameters():
        key = id(parameter)
        _ORIGINALS[key] = weakref.ref(parameter, lambda _, key=key: _ORIGINALS.pop(key, None))  # type: ignore[misc]
    if not _watching:
        register_optimizer_step_pre_hook(_refuse_stale)
        _watching = True


def _refuse_stale(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stale = None
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return  # the original is being trained, which is its owner's right
            known = _ORIGINALS.get(id(parameter))
            if known is not None and known() is parameter:
                stale = parameter
    if stale is not None:
        raise OptionError(
            "this optimizer holds the parameters of a module as they were before parallelize, and none of them has a "
            "gradient: build the optimizer from the parallel module's parameters()"
        )
