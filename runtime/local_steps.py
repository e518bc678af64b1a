"""Lets torch's elementwise optimizers step over the local pieces of a parallel module's parameters.

An optimizer over DTensors sends each of its small operations through DTensor, which finds every time that the pieces
may be taken one by one. For an optimizer whose step treats every element alike that holds for the step as a whole: the
pieces of parameter, gradient and state are put in place of the DTensors while ``step`` runs, and taken back after it.
Same kernels, same numbers. The first step of an optimizer is as usual; anything out of the ordinary stays as usual.
"""

from __future__ import annotations

import functools
import types
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from autopar.passes.torch_private import step_hooks
from autopar.runtime.state import as_dtensor_like, local_of

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""What happens to an element depends on that element's parameter, gradient and state alone."""

State = dict[str, Any]

_seen: WeakSet[Optimizer] = WeakSet()


def step_locally(parameters: Iterable[Tensor]) -> None:
    """Let elementwise optimizers that hold these DTensor parameters step over their pieces."""
    for parameter in parameters:
        parameter._autopar_steps_locally = True  # type: ignore[attr-defined]


def _replace_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Replace the method of an optimizer that has just made its first step, if it is one that can step locally."""
    if optimizer in _seen:
        return
    _seen.add(optimizer)
    if type(optimizer) in ELEMENTWISE and any(hasattr(p, "_autopar_steps_locally") for p in _all(optimizer)):
        optimizer.step = _over_pieces(optimizer, optimizer.step)  # type: ignore[method-assign]


register_optimizer_step_post_hook(_replace_step)


def _over_pieces(optimizer: Optimizer, step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def over_pieces(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not _is_ordinary(self):
            return step(*args, **kwargs)
        pieces = _Pieces(self)
        pieces.put_in()
        try:
            return step()
        finally:
            pieces.take_back()

    # A method, since learning rate schedulers bind what they wrap.
    return types.MethodType(over_pieces, optimizer)


def _is_ordinary(optimizer: Optimizer) -> bool:
    """Tell whether nobody looks at the optimizer during its step, and gradients lie as their parameters."""
    watched = any(not str(hook.__module__).startswith("autopar.") for hook in step_hooks(optimizer))
    if watched or getattr(optimizer, "grad_scale", None) is not None:
        return False
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return False
    return all(
        hasattr(p, "_autopar_steps_locally")
        and (p.grad is None or (isinstance(p.grad, DTensor) and p.grad.placements == p.placements))
        for p in _all(optimizer)
    )


def _all(optimizer: Optimizer) -> Iterable[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


class _Pieces:
    """An optimizer's parameters and state, and the pieces that stand for them while it steps."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.lists = [group["params"] for group in optimizer.param_groups]
        self.state = optimizer.state
        self.pieces: list[tuple[DTensor, Tensor]] = [(p, local_of(p)) for p in _all(optimizer)]
        self.given: list[State] = []

    def put_in(self) -> None:
        """Put the pieces in place of the DTensors."""
        state: defaultdict[Tensor, State] = defaultdict(dict)
        for parameter, piece in self.pieces:
            if parameter.grad is not None:
                piece.grad = local_of(parameter.grad)
            # Written out: this runs for every tensor of the state in every step.
            mine = {
                key: value._local_tensor if isinstance(value, DTensor) else value
                for key, value in self.state.get(parameter, {}).items()
            }
            self.given.append(dict(mine))
            if mine:
                state[piece] = mine
        for group, parameters in zip(self.optimizer.param_groups, self.lists):
            group["params"] = [parameter._local_tensor for parameter in parameters]
        self.optimizer.state = state

    def take_back(self) -> None:
        """Put the DTensors back, with what the step made or replaced in the state."""
        stepped = self.optimizer.state
        self.optimizer.state = self.state
        for group, parameters in zip(self.optimizer.param_groups, self.lists):
            group["params"] = parameters
        changed = []
        for (parameter, piece), given in zip(self.pieces, self.given):
            if piece.grad is not None:
                piece.grad = None
                changed.append(parameter)
            for key, value in stepped.get(piece, {}).items():
                if key not in given or value is not given[key]:
                    self.state[parameter][key] = _like(value, parameter)
        # Who watches the parameters for changes watches the DTensors.
        increment_version(changed)


def _like(value: Any, parameter: DTensor) -> Any:
    """Return a new value of the state: of a tensor like the piece, a DTensor like the parameter."""
    if isinstance(value, Tensor) and value.shape == local_of(parameter).shape and value.dim():
        return as_dtensor_like(value, parameter)
    return value
