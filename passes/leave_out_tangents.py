"""A backward for fewer outputs than it was made for: what comes only from outputs that no gradient reached is left out.

On one device nothing runs there. Zeros in the place of the missing gradients are not the same: a slope may be infinite
or not a number (a root or a norm of zero), and a hook may add something.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import torch
from torch import fx

from .collective_calls import is_coalesced
from .program import is_getitem, tensors_of, touches_generator
from .stage_pieces import Segment, StagedProgram


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
    has_gradient = _behind_tangents(graph.nodes, {**dict.fromkeys(reached, True), **dict.fromkeys(missing, False)})
    for node in [node for node, there in has_gradient.items() if not there]:
        _put_zeros(graph, node, [user for user in node.users if has_gradient[user]])
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not touches_generator(node):
            graph.erase_node(node)
    graph.lint()
    return fx.GraphModule(backward, graph)


def leave_out_in_stages(
    staged: StagedProgram, joint: fx.Graph, reached: Collection[str], missing: Collection[str]
) -> StagedProgram:
    """Return a program in stages without what only the tangents ``missing`` lead to.

    Every segment takes and gives as many values, and so does every message: zeros are what travels, and adds to totals,
    in the place of a gradient that is not there.

    Args:
        staged: cut from ``joint``.
        reached, missing: names of all tangents, with a gradient and without.
    """
    behind = _behind_tangents(joint.nodes, {**dict.fromkeys(reached, True), **dict.fromkeys(missing, False)})
    has_gradient = {node.name: there for node, there in behind.items()}
    stages = []
    for pieces in staged.stages:
        segments = {when: _narrowed(segment, has_gradient) for when, segment in pieces.segments.items()}
        stages.append(replace(pieces, segments=segments))
    return replace(staged, stages=tuple(stages))


def _narrowed(segment: Segment, has_gradient: Mapping[str, bool]) -> Segment:
    """Return a segment as it is, or without what only tangents that miss lead to."""
    placeholders = [node for node in segment.graph_module.graph.nodes if node.op == "placeholder"]
    known = {
        node.name: has_gradient[name]
        for node, name in zip(placeholders, segment.takes, strict=True)
        if name in has_gradient
    }
    there, gone = ([name for name, found in known.items() if found is wanted] for wanted in (True, False))
    return replace(segment, graph_module=leave_out_tangents(segment.graph_module, there, gone)) if gone else segment


def _behind_tangents(nodes: Iterable[fx.Node], tangents: Mapping[str, bool]) -> dict[fx.Node, bool]:
    """Return of every node behind a tangent whether one with a gradient leads to it."""
    has_gradient: dict[fx.Node, bool] = {}
    for node in nodes:
        found = {has_gradient[operand] for operand in _sources(node) if operand in has_gradient}
        if is_coalesced(node) and any(operand not in has_gradient for operand in node.all_input_nodes):
            found = {True}  # it moves what is no gradient too
        if node.name in tangents and node.op == "placeholder":
            found = {tangents[node.name]}
        if found:
            has_gradient[node] = True in found or node.op == "output"
    return has_gradient


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
