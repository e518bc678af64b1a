"""Let all-reduces work on what they are given, where nobody reads that any more."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..collective_calls import IN_PLACE, collective_calls
from .edits import Edit, Retarget
from .setting import Setting

_ATEN: Any = torch.ops.aten

_FRESH: frozenset[Any] = frozenset({_ATEN.linear.default, _ATEN.matmul.default, _ATEN.einsum.default})
"""Composite ops that always return new memory; of others that is not known."""


def reduce_in_place(joint: fx.GraphModule, setting: Setting) -> list[Edit]:
    """Return the all-reduces that need no copy of their operand.

    Safe where the operand's memory was made in this program, and nothing that may lie in it is read behind the call, by
    an op, by the backward, or as an output. Whatever may be a view counts as one: how tensors lie in memory is known
    only when the program runs.
    """
    graph = joint.graph
    position = {node: index for index, node in enumerate(graph.nodes)}
    memories = _memories(graph)
    last_read = {
        memory: max((position[user] for node in nodes for user in node.users), default=-1)
        for memory, nodes in memories.items()
    }
    memory_of = {node: memory for memory, nodes in memories.items() for node in nodes}
    edits: list[Edit] = []
    for node in graph.nodes:
        if node.target not in IN_PLACE:
            continue
        own = [memory_of[call.operand] for call in collective_calls(node)]
        foreign = any(_is_foreign(member, setting) for memory in own for member in memories[memory])
        own_alone = len(set(own)) == len(own) and not foreign
        if own_alone and all(last_read[memory] <= position[node] for memory in own):
            edits.append(Retarget(node.name, IN_PLACE[node.target]))
    return edits


def _memories(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return the nodes that may lie in the same memory, by the first of them."""
    owner: dict[fx.Node, fx.Node] = {}
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        owner[node], members[node] = node, [node]
        for source in node.all_input_nodes if may_be_view(node) else ():
            one, other = owner[source], owner[node]
            if one is not other:
                for moved in members[other]:
                    owner[moved] = one
                members[one] += members.pop(other)
    return members


def may_be_view(node: fx.Node) -> bool:
    """Tell whether a result of an op may lie in the memory of an operand."""
    if node.op != "call_function":
        return False
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    if target in _FRESH:
        return False
    is_composite = target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return is_composite or any(result.alias_info is not None for result in target._schema.returns)


def _is_foreign(node: fx.Node, setting: Setting) -> bool:
    """Tell whether the memory outlives the step: what comes in, constants, and copies of parameters that are kept."""
    return node.op in ("placeholder", "get_attr") or (node.meta.get("tensor"), node.meta.get("layout")) in setting.kept
