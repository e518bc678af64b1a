"""Look for the two faults of a raw trace that would give wrong numbers without an error."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopar.errors import CaptureError

from .trace_joint import RawTrace

aten = torch.ops.aten

_MEMORY = (aten.as_strided.default, aten.as_strided_scatter.default)

_CUTS = frozenset({
    aten.detach.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.empty_like.default, aten.rand_like.default, aten.randn_like.default, aten.new_zeros.default,
    aten.new_ones.default, aten.new_full.default, aten.new_empty.default,
})  # fmt: skip
"""Ops through which no gradient flows, though operand and result are floats."""


def constants_of(graph_module: fx.GraphModule) -> list[Tensor]:
    """Return the tensors that a graph reads as constants."""
    names = [str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr"]
    return [value for value in (getattr(graph_module, name, None) for name in names) if isinstance(value, Tensor)]


def check_trace(trace: RawTrace, model: nn.Module, names: list[str]) -> None:
    """Check that no parameter or buffer was burnt in as a constant, no gradient got lost, no buffer waits for one.

    Raises:
        CaptureError: the parameter or input that is concerned, and what to do.
    """
    owned = {id(t): name for name, t in itertools.chain(model.named_parameters(), model.named_buffers())}
    for node in trace.graph_module.graph.nodes:
        value = getattr(trace.graph_module, str(node.target), None) if node.op == "get_attr" else None
        if id(value) in owned or isinstance(value, nn.Parameter):
            raise CaptureError(
                f"{owned.get(id(value), 'a parameter that is not registered')} was reached past its module"
                f"{_at(node)} (through a list, a closure or another object), so it would be a constant. "
                "Read it as an attribute of the module that owns it."
            )
        if node.target in _MEMORY:
            raise CaptureError(
                f"{node.target}{_at(node)} looks at how its operand lies in memory, past what the operand holds; the "
                "pieces of a parallel program lie otherwise. Use unfold, a slice or an index."
            )
    results: Any = trace.graph_module.graph.output_node().args[0]
    for name, result in zip(trace.written, results[len(results) - len(trace.written) :]):
        if result.meta.get("phase") == "backward":
            kind = "buffer" if any(name == full for full, _ in model.named_buffers()) else "input"
            raise CaptureError(
                f"the {kind} {name} is written to by the backward{_at(result)}; a parallel program takes the new "
                f"values of {kind}s from the forward. Write to it in forward(), or after the step."
            )
    placeholders = [node for node in trace.graph_module.graph.nodes if node.op == "placeholder"]
    for i in trace.missing:
        reached = _reached_output(placeholders[i], trace)
        if reached is not None:
            raise CaptureError(
                f"{names[i]} wants a gradient and reaches the output{_at(reached)}, but autograd gives it none. "
                "If that is meant, detach it there or freeze it with requires_grad_(False)."
            )


def _at(node: fx.Node) -> str:
    source = node.meta.get("source")
    return f" at {source}" if source else ""


def _reached_output(start: fx.Node, trace: RawTrace) -> fx.Node | None:
    """Return the differentiated output that ``start`` reaches through ops that have gradients; None for none."""
    results: Any = trace.graph_module.graph.output_node().args[0]
    ends: set[fx.Node] = {results[trace.tensor_leaves.index(leaf)] for leaf in trace.tangents}
    seen, stack = {start}, [start]
    while stack:
        for user in stack.pop().users:
            if user in seen or not _carries_gradient(user, ends):
                continue
            if user in ends:
                return user
            seen.add(user)
            stack.append(user)
    return None


def _carries_gradient(node: fx.Node, ends: set[fx.Node]) -> bool:
    if node.op != "call_function" or node.meta.get("phase") != "forward" or not node.meta.get("differentiable"):
        return False
    floats = any(isinstance(t, Tensor) and t.is_floating_point() for t in pytree.tree_leaves(node.meta.get("val")))
    return floats and (node.target not in _CUTS or node in ends)
