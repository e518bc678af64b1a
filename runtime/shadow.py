"""The source of programs: a copy of the user's module without its data, from which every input signature is traced."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.errors import CaptureError, InputError, OptionError
from autopar.mesh import Mesh
from autopar.passes.program import Program
from autopar.runtime.copy_model import copy_model
from autopar.runtime.signature import Call


@dataclass
class Source:
    """A module to trace.

    Attributes:
        module: the module; for a running model a copy whose parameters and buffers are on the meta device.
        num_targets: how many of the last positional inputs go to the loss instead of the original module.
    """

    module: nn.Module
    num_targets: int = 0

    @classmethod
    def of(cls, model: nn.Module, loss: Callable[..., torch.Tensor] | None) -> Source:
        """Return a source that keeps nothing of ``model``'s data, with ``loss`` put behind its outputs.

        Raises:
            CaptureError: the module can't be copied.
            OptionError: ``loss`` can't be called with an output.
        """
        shadow = copy_without_data(model)
        if loss is None:
            return cls(shadow)
        num_targets = count_targets(loss)
        append_loss(shadow, loss, num_targets)
        return cls(shadow, num_targets)

    def capture(
        self, call: Call, mesh: Mesh, inputs: str, *, every_output: bool = False, fingerprint: str = ""
    ) -> Program:
        """Trace the module on a call; with ``inputs="local"`` on the global batch that its tensors are a share of.

        Args:
            every_output: differentiate the outputs beside a loss too.
            fingerprint: of the program that a plan is for; they are differentiated too where only that leads to it.

        Raises:
            CaptureError: the module can't be traced on these inputs.
            InputError: the loss gets too few inputs.
        """
        program = self._trace(call, mesh, inputs, every_output)
        if fingerprint in ("", program.fingerprint()) or every_output or program.loss is None:
            return program
        wider = self._trace(call, mesh, inputs, True)
        return wider if wider.fingerprint() == fingerprint else program

    def _trace(self, call: Call, mesh: Mesh, inputs: str, every_output: bool) -> Program:
        from autopar.passes.capture import capture

        args, kwargs = call.args, call.kwargs
        if self.num_targets > len(args):
            raise InputError(
                f"the loss takes {self.num_targets} targets from the end of the positional inputs, but the call has "
                f"{len(args)}; pass the module's inputs first, then the targets"
            )
        if inputs == "local":
            args, kwargs = pytree.tree_map(lambda leaf: _global_leaf(leaf, mesh.sizes[0]), (args, kwargs))
        with ExitStack() as stack:
            # Tracing runs on fake CPU tensors, whatever the device: the casts of the device's autocast are the same.
            if torch.is_autocast_enabled("cuda") and not torch.is_autocast_enabled("cpu"):
                stack.enter_context(torch.autocast("cpu", dtype=torch.get_autocast_dtype("cuda")))
            stack.enter_context(torch.set_grad_enabled(call.signature.gradient))
            return capture(self.module, args, kwargs, training=call.signature.gradient, every_output=every_output)


def _global_leaf(leaf: Any, parts: int) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
        return leaf
    shape = (leaf.shape[0] * parts, *leaf.shape[1:])
    return torch.empty(shape, dtype=leaf.dtype, requires_grad=leaf.requires_grad, device=leaf.device)


def copy_without_data(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` whose parameters and buffers are meta tensors, with ties and strides kept.

    Raises:
        CaptureError: the module holds something that can't be copied.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(_meta_like(parameter), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo.setdefault(id(buffer), _meta_like(buffer))
    try:
        return copy_model(model, memo)
    except (TypeError, RuntimeError) as error:
        raise CaptureError(
            f"{type(model).__name__} can't be copied ({error}); autopar traces a copy without data for every new input "
            "shape: keep locks, files and the like out of the module's attributes"
        ) from error


def _meta_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def count_targets(loss: Callable[..., Any]) -> int:
    """Return how many targets a loss takes: its required positional parameters beyond the first.

    Raises:
        OptionError: it takes no positional parameter.
    """
    if not callable(loss):
        raise OptionError(f"loss= takes a callable; got {type(loss).__name__}")
    function = loss.forward if isinstance(loss, nn.Module) else loss
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind in positional]
    if not parameters:
        raise OptionError("loss= is called with what the module returns, but it takes no positional argument")
    return sum(parameter.default is inspect.Parameter.empty for parameter in parameters[1:])


def append_loss(module: nn.Module, loss: Callable[..., torch.Tensor], num_targets: int) -> None:
    """Make ``module`` return ``loss(output, *targets)``, the targets being its last positional inputs.

    Its class is replaced by a subclass, so that the names of its parameters stay what they are.
    """
    original = type(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        split = len(args) - num_targets
        return loss(original.forward(self, *args[:split], **kwargs), *args[split:])

    module.__class__ = type(original.__name__, (original,), {"forward": forward, "__module__": original.__module__})
