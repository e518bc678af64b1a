"""Trace a module's forward, and the backward of what it returns, into one raw graph on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopar.errors import CaptureError

from . import ops, torch_private
from .output_leaves import flatten_outputs, loss_of
from .trace_batch_norm import average_by_tensors
from .trace_ops import TraceOps
from .trace_recorder import TraceRecorder

assert ops is not None


@dataclass
class RawTrace:
    """A raw graph and what its output tuple holds.

    Attributes:
        graph_module: returns the tensor leaves, then the gradients that exist, then the buffers that were written to.
        out_spec: pytree spec of what the module returned.
        leaves: ``(path, value)`` of every output leaf; tensors are stood for by None.
        tensor_leaves: positions of the leaves that are tensors.
        differentiable: positions of the leaves that autograd computes from what wants a gradient.
        loss: position of the loss, or None.
        tangents: positions of the leaves that have a tangent, in the order of their placeholders.
        gradients: positions, among the arguments, that have a gradient.
        written: names of the buffers and inputs that have a new value.
        missing: positions, among the arguments that want a gradient, of those that have none.
    """

    graph_module: fx.GraphModule
    out_spec: pytree.TreeSpec
    leaves: list[tuple[str, Any]]
    tensor_leaves: list[int] = field(default_factory=list)
    differentiable: list[int] = field(default_factory=list)
    loss: int | None = None
    tangents: list[int] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)


class Joint:
    """The function that is traced; it fills ``trace`` in while it runs."""

    def __init__(
        self,
        model: nn.Module,
        names: list[str],
        kinds: list[str],
        in_spec: pytree.TreeSpec,
        leaves: list[Any],
        wants: list[bool],
        every_output: bool = False,
    ) -> None:
        self.every_output = every_output
        self.model, self.names, self.kinds = model, names, kinds
        self.in_spec, self.leaves, self.wants = in_spec, leaves, wants
        self.recorder = TraceRecorder(model)
        self.trace = RawTrace(fx.GraphModule({}, fx.Graph()), pytree.tree_structure(None), [])

    def __call__(self, *arguments: Tensor) -> list[Tensor]:
        """Run forward and backward on traced tensors; return the raw graph's outputs."""
        with self.recorder.watching(torch_private.tracing_graph()), torch.set_grad_enabled(any(self.wants)):
            wrapped = self._wrapped(arguments)
            before = [torch_private.unwrap(tensor) for tensor in wrapped]
            with self._in_place(wrapped) as (state, flat):
                with TraceOps(self.recorder) as ops_seen:
                    leaves = self._forward(flat)
                ops_seen.places.require_unwritten()
                # A view of what was written to is computed when it is unwrapped: that belongs to the forward too.
                results = [torch_private.unwrap(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
                for buffer in self.model.buffers():
                    torch_private.unwrap(buffer)
                gradients = self._backward(leaves, wrapped)
            return [*results, *gradients, *self._written(wrapped, before, state)]

    def run_forward(self, arguments: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
        """Run the forward alone on traced tensors; return output leaves and buffers, and what is no tensor."""
        watching, gradients = (
            self.recorder.watching(torch_private.tracing_graph()),
            torch.set_grad_enabled(any(self.wants)),
        )
        with watching, gradients, self._in_place(self._wrapped(arguments)) as (_, flat):
            with TraceOps(self.recorder):
                leaves = self._forward(flat)
            tensors = [*(leaf for leaf in leaves if isinstance(leaf, Tensor)), *self.model.buffers()]
            return [torch_private.unwrap(t) for t in tensors], [leaf for _, leaf in self.trace.leaves]

    def _wrapped(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        wrapped = [torch_private.wrap(a) for a in arguments]
        for tensor, want in zip(wrapped, self.wants):
            tensor.requires_grad_(want)
        return wrapped

    @contextmanager
    def _in_place(self, wrapped: Sequence[Tensor]) -> Iterator[tuple[dict[str, Tensor], tuple[Any, Any]]]:
        """Put traced tensors in place of the model's own; give those, and the inputs of the call."""
        state = {name: t for name, kind, t in zip(self.names, self.kinds, wrapped) if kind != "input"}
        flat = self._filled(iter(t for t, kind in zip(wrapped, self.kinds) if kind == "input"))
        with torch_private.swapped_tensors(self.model, state), torch_private.without_checkpoints():
            average_by_tensors(self.model)
            yield state, flat

    def _filled(self, tensors: Iterator[Tensor]) -> tuple[Any, Any]:
        """Return ``(args, kwargs)`` with traced tensors in place of the example inputs."""
        flat = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(flat, self.in_spec)
        return args, kwargs

    def _forward(self, inputs: tuple[Any, Any]) -> list[Any]:
        result = self.model(*inputs[0], **inputs[1])
        paths, leaves, self.trace.out_spec = flatten_outputs(result)
        self.trace.leaves = [(p, None if isinstance(x, Tensor) else x) for p, x in zip(paths, leaves)]
        self.trace.tensor_leaves = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        return leaves

    def _backward(self, leaves: list[Any], wrapped: list[Tensor]) -> list[Tensor]:
        trace = self.trace
        trace.differentiable = [i for i in trace.tensor_leaves if leaves[i].requires_grad]
        trace.loss = loss_of([path for path, _ in trace.leaves], leaves, trace.out_spec)
        only_loss = trace.loss is not None and not self.every_output
        trace.tangents = [i for i in trace.differentiable if i == trace.loss or not only_loss]
        if not trace.tangents:
            return []
        self.recorder.phase = "backward"
        tangents = [_tangent(f"tangent_{i}", leaves[i]) for i in trace.tangents]
        wanted = [i for i, want in enumerate(self.wants) if want]
        grads = torch.autograd.grad(
            [leaves[i] for i in trace.tangents], [wrapped[i] for i in wanted], tangents, allow_unused=True
        )
        trace.gradients = [i for i, grad in zip(wanted, grads) if grad is not None]
        trace.missing = [i for i, grad in zip(wanted, grads) if grad is None]
        return [torch_private.unwrap(grad) for grad in grads if grad is not None]

    def _written(self, wrapped: list[Tensor], before: list[Tensor], state: dict[str, Tensor]) -> list[Tensor]:
        results = []
        for name, kind, tensor, old in zip(self.names, self.kinds, wrapped, before):
            now = state[name] if kind != "input" else tensor
            new = torch_private.unwrap(now)
            if new is old:
                continue
            if kind == "parameter" or tensor.requires_grad:
                raise CaptureError(_written_message(kind, name))
            self.trace.written.append(name)
            results.append(new)
        return results


def _tangent(name: str, like: Tensor) -> Tensor:
    with torch_private.without_tracing():
        value = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    torch_private.new_placeholder(name, value)
    return torch_private.wrap(value)


def _written_message(kind: str, name: str) -> str:
    advice = {
        "input": "Write into a copy (x = x.clone()).",
        "parameter": "Change parameters after the optimizer's step, outside of forward (an Embedding with max_norm "
        "writes in every forward: make it without, and renormalize its weight there), or make it a buffer.",
    }
    what = f"{kind} {name}{', which wants a gradient,' if kind == 'input' else ''}"
    return f"the model writes into its {what} while it runs; a parallel program can't do that. {advice[kind]}"
