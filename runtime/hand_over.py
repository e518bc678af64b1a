"""Puts gradients into their parameters, where all that autograd would do is the same by a longer way.

Autograd detaches each gradient as it accumulates it, which a DTensor answers in Python. Whoever looks on gets what
autograd gives: a parameter with hooks, ``torch.autograd.grad``, and ``backward(inputs=...)`` go the usual way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.passes.torch_private import engine_will_run
from autopar.runtime.carry_hooks import is_watched
from autopar.runtime.state import local_of


def hand_over(gradients: list[Tensor | None], parameters: Mapping[int, Tensor], next_functions: Sequence[Any]) -> None:
    """Accumulate gradients into the parameters that only wait for theirs; None takes their places in the list.

    Called in the backward of the autograd node that the parameters feed.

    Args:
        gradients: of the node's inputs.
        parameters: those among the inputs that are parameters, by position.
        next_functions: what autograd runs for each input that is a tensor.
    """
    for position, parameter in parameters.items():
        gradient = gradients[position]
        if gradient is None or not _only_accumulates(parameter, gradient):
            continue
        will_run = engine_will_run(next_functions[position][0])
        if will_run is None:
            return  # torch.autograd.grad: it wants them back
        if not will_run:
            continue
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            local_of(parameter.grad).add_(local_of(gradient))
        gradients[position] = None


def _only_accumulates(parameter: Tensor, gradient: Tensor) -> bool:
    """Tell whether a parameter is one of autopar's, nobody watches its gradient, and the two gradients lie alike."""
    if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor) or not parameter.is_leaf:
        return False
    if is_watched(parameter):
        return False
    held = parameter.grad
    return held is None or (
        isinstance(held, DTensor)
        and held.placements == gradient.placements
        and held.dtype == gradient.dtype
        and not held.requires_grad
    )
