"""What a trace depends on beside the inputs' values, so that a call can be traced again later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.runtime.signature import Call


@dataclass(frozen=True)
class Situation:
    """The modes under which a module was called.

    Attributes:
        modes, flags: training flag of every module, gradient flag of every parameter, by full name.
        casts: device type -> dtype of its autocast, where one was on.
    """

    modes: dict[str, bool]
    flags: dict[str, bool]
    casts: dict[str, torch.dtype]

    @classmethod
    def of(cls, module: nn.Module) -> Situation:
        """Return the situation of a call of ``module`` now."""
        modes = {name: child.training for name, child in module.named_modules(remove_duplicate=False)}
        flags = {name: p.requires_grad for name, p in module.named_parameters(remove_duplicate=False)}
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        return cls(modes, flags, {kind: torch.get_autocast_dtype(kind) for kind in kinds})

    def put(self, module: nn.Module) -> None:
        """Set the training flag of every module and the gradient flag of every parameter of ``module``."""
        for name, child in module.named_modules():
            child.training = self.modes.get(name, child.training)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(self.flags.get(name, parameter.requires_grad))

    @contextmanager
    def again(self, module: nn.Module) -> Iterator[None]:
        """Return to this situation for a while."""
        before = Situation.of(module)
        with ExitStack() as stack:
            for kind in ("cpu", "cuda"):
                if self.casts.get(kind) != before.casts.get(kind):
                    stack.enter_context(torch.autocast(kind, dtype=self.casts.get(kind), enabled=kind in self.casts))
            stack.callback(before.put, module)
            self.put(module)
            yield


def without_data(call: Call) -> Call:
    """Return the call with meta tensors: enough to trace it."""

    def empty(tensor: Tensor) -> Tensor:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return made.requires_grad_(tensor.requires_grad)

    args, kwargs, leaves = pytree.tree_map_only(Tensor, empty, (call.args, call.kwargs, call.leaves))
    return Call(args, kwargs, leaves, call.signature)
