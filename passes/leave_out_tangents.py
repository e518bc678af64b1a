"""A backward for fewer outputs than it was made for: what comes only from outputs that no gradient reached is left out.

On one device nothing runs there. Zeros in the place of the missing gradients are not the same: a slope may be infinite
or not a number (a root or a norm of zero), and a hook may add something.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from .collective_calls import is_coalesced
from .program import is_getitem, tensors_of, touches_generator


def leave_out_tangents(backward: fx.GraphModule, reached: Collection[str], missing: Collection[str]) -> fx.GraphModule:
    """Return a copy of a lowered backward without what only the tangents ``missing`` lead to.

    It takes and returns as many tensors; what others read from the parts that are left out are zeros. The copies of
    all ranks have the same sequence of nodes, as their originals do.

    Args:
        backward: the graph.
        reached, missing: names of all tangents, with a gradient and without.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(backward.graph, {}))
    names = {**dict.fromkeys(reached, True), **dict.fromkeys(missing, False)}
    has_gradient: dict[fx.Node, bool] = {}  # of the nodes behind a tangent
    for node in graph.nodes:
        found = {has_gradient[operand] for operand in _sources(node) if operand in has_gradient}
        if is_coalesced(node) and any(operand not in has_gradient for operand in node.all_input_nodes):
            found = {True}  # it moves what is no gradient too
        if node.name in names and node.op == "placeholder":
            found = {names[node.name]}
        if found:
            has_gradient[node] = True in found or node.op == "output"
    for node in [node for node, there in has_gradient.items() if not there]:
        _put_zeros(graph, node, [user for user in node.users if has_gradient[user]])
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not touches_generator(node):
            graph.erase_node(node)
    graph.lint()
    return fx.GraphModule(backward, graph)


def _sources(node: fx.Node) -> list[fx.Node]:
    """Return what a node is computed from; a part of several collectives that run as one comes from its own operand."""
    if is_getitem(node) and is_coalesced(node.args[0]):  # type: ignore[arg-type]
        call, index = node.args
        return [call.args[0][index]]  # type: ignore[union-attr,index,list-item]
    return node.all_input_nodes


def _put_zeros(graph: fx.Graph, node: fx.Node, readers: list[fx.Node]) -> None:
    """Let ``readers`` read zeros of the form of ``node``."""
    if not readers:
        return
    (val,) = tensors_of(node)
    with graph.inserting_after(node):
        zeros = graph.create_node(
            "call_function",
            torch.ops.aten.zeros.default,
            (list(val.shape),),
            {"dtype": val.dtype, "device": torch.device("cpu")},
            name=f"no_{node.name}",
        )
    zeros.meta.update({**node.meta, "val": val})
    for reader in readers:
        reader.replace_input_with(node, zeros)
