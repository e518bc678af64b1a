"""Hooks on the parameters of a module go with them when it is parallelized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

Hook = Callable[[Tensor], Any]


def carry_hooks(original: nn.Parameter, parameter: nn.Parameter) -> None:
    """Give ``parameter`` the hooks of the parameter that it takes the place of.

    A hook on the gradient was written for the whole one, so it gets that (a collective), and what it makes of it is
    split again. A hook that runs once the gradient is there gets the parameter, with the gradient as it lies.
    """
    for hook in (original._backward_hooks or {}).values():
        parameter.register_hook(_on_the_whole(hook))
    for after in (original._post_accumulate_grad_hooks or {}).values():  # type: ignore[attr-defined]
        parameter.register_post_accumulate_grad_hook(after)


def is_watched(parameter: Tensor) -> bool:
    """Tell whether a hook looks at every gradient of a parameter."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


def _on_the_whole(hook: Hook) -> Hook:
    def run(gradient: Tensor) -> Any:
        if not isinstance(gradient, DTensor):
            return hook(gradient)
        whole = gradient.full_tensor()
        made = hook(whole)
        whole = whole if made is None else made  # it may have written into what it got
        mesh = gradient.device_mesh
        full = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return full.redistribute(placements=gradient.placements)

    return run
