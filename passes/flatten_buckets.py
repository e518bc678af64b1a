"""Runs several collectives that go as one over one flat buffer, as PyTorch's own data parallelism does.

In a lowered graph such a collective takes a list of tensors and returns one, so that its parts stay apart for whoever
reads the program. A backend may carry that out part by part, or copy in and out more than once, and each part is waited
for by a call of its own. Here the operands are copied into one tensor, one call moves it, one wait waits for it, and
the parts are views of what comes out. Pieces that are gathered lie between those of other ranks: they are copied out.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from .collective_calls import WAIT, Call, collective_calls, is_coalesced
from .split_phases import GraphOnly

aten: Any = torch.ops.aten
c10d: Any = torch.ops._c10d_functional


def flattened(module: fx.GraphModule) -> fx.GraphModule:
    """Return a lowered graph with flat buffers, to read: itself where nothing goes as one."""
    if not any(is_coalesced(node) for node in module.graph.nodes):
        return module
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    flatten_buckets(graph)
    return GraphOnly(module, graph)


def flatten_buckets(graph: fx.Graph) -> None:
    """Change a lowered graph in place. Safe where ``val`` of the nodes is right: shapes are read off it."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if is_coalesced(node):
            _flatten(graph, node, position)


def _flatten(graph: fx.Graph, node: fx.Node, position: dict[fx.Node, int]) -> None:
    calls = collective_calls(node)
    kind, ranks = calls[0].kind, _ranks(calls[0])
    sizes = [call.value.numel() for call in calls]
    total = sum(sizes)
    new: list[fx.Node] = []

    def add(target: Any, *args: Any) -> fx.Node:
        new.append(graph.call_function(target, args))
        return new[-1]

    with graph.inserting_before(node):
        if kind == "reduce_scatter":
            rows = [add(aten.reshape.default, call.operand, [ranks, -1]) for call in calls]
            flat = add(aten.view.default, add(aten.cat.default, rows, 1), [-1])
        else:
            flat = add(aten.cat.default, [add(aten.reshape.default, call.operand, [-1]) for call in calls])
        op = c10d.all_reduce_.default if kind == "all_reduce" else calls[0].op
        sent = add(op, flat, *calls[0].arguments)
    flat.meta["val"] = torch.empty(sum(call.operand.meta["val"].numel() for call in calls), **_like(calls[0]))
    sent.meta["val"] = torch.empty(total, **_like(calls[0]))
    parts = {int(part.args[1]): part for part in node.users}  # type: ignore[arg-type]
    waits = [wait for part in parts.values() for wait in part.users]
    with graph.inserting_before(min(waits, key=position.__getitem__)):
        whole = add(WAIT, sent)
        if kind == "all_gather":
            whole = add(aten.view.default, whole, [ranks, total // ranks])
            pieces = add(aten.split_with_sizes.default, whole, [size // ranks for size in sizes], 1)
        else:
            pieces = add(aten.split_with_sizes.default, whole, sizes)
    for made in new:
        made.meta.update({key: node.meta[key] for key in ("phase", "origin", "reason") if key in node.meta})
    for index, part in parts.items():
        for wait in list(part.users):
            with graph.inserting_before(wait):
                piece = graph.call_function(operator.getitem, (pieces, index))
                shape = list(calls[index].value.shape)
                how = aten.reshape.default if kind == "all_gather" else aten.view.default
                end = graph.call_function(how, (piece, shape))
            end.meta = dict(wait.meta)
            wait.replace_all_uses_with(end)
            graph.erase_node(wait)
        graph.erase_node(part)
    graph.erase_node(node)


def _like(call: Call) -> dict[str, Any]:
    return {"dtype": call.value.dtype, "device": "meta"}


def _ranks(call: Call) -> int:
    """Return how many ranks a gather or a reduce-scatter spans; 1 for a sum, where it does not count."""
    if call.kind == "all_reduce":
        return 1
    return int(call.arguments[0 if call.kind == "all_gather" else 1])
