"""Leave gradients unreduced between backwards, so that several of them before a step of the optimizer share one
reduction (ZeRO-0, ZeRO-1).

Unasked only gradients wait whose reduction changes no shape: then the sum on each rank takes the memory that the
gradient takes anyway. One that is scattered is kept whole while it waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.placement import PARTIAL_SUM, Layout

from .collective_calls import WAIT, collective_calls, is_coalesced
from .improve.memories import Memories
from .improve.setting import Setting
from .improve.write_in_place import written_operands
from .local_program import LocalProgram
from .program import is_getitem
from .split_phases import GraphOnly

_ADD: Any = torch.ops.aten.add.Tensor


@dataclass(frozen=True)
class Deferred:
    """The backward in two other forms.

    Attributes:
        positions: the gradients that can wait, among those that the backward returns.
        layouts: of their sums, partial.
        without: the backward that returns them unreduced.
        resumed: the backward that takes earlier sums after its other arguments, and reduces them with its own.
    """

    positions: tuple[int, ...]
    layouts: tuple[Layout, ...]
    without: fx.GraphModule
    resumed: fx.GraphModule


@dataclass(frozen=True)
class _Chain:
    """The reduction of one gradient: where it starts, what reads that, and all its nodes, the last first."""

    start: fx.Node
    head: fx.Node
    nodes: tuple[fx.Node, ...]


def defer_reductions(local: LocalProgram, *, scattered: bool = False) -> Deferred | None:
    """Return the other forms of the backward of a lowered program, None where no gradient can wait.

    Args:
        local: the program.
        scattered: gradients that are reduced and scattered wait too.
    """
    if local.backward is None:
        return None
    roles = [role for role in local.outputs if role.kind == "gradient" and role.node is not None]
    layouts = {role.node: layout for role, layout in zip(local.outputs, local.output_layouts)}
    kinds = {role.node: role.kind for role in local.inputs}
    (ends,) = next(node for node in local.backward.graph.nodes if node.op == "output").args
    chains: dict[int, _Chain] = {}
    for position, (role, end) in enumerate(zip(roles, ends)):  # type: ignore[arg-type]
        once = isinstance(end, fx.Node) and ends.count(end) == 1  # type: ignore[union-attr]
        chain = _chain(end, scattered) if once else None  # type: ignore[arg-type]
        rests = local.input_layouts.get(role.of)
        apart = chain is not None and chain.start not in [other.start for other in chains.values()]
        if chain is not None and apart and kinds.get(role.of) == "parameter" and layouts[role.node] == rests:
            chains[position] = chain
    chains = _unwritten(chains, local)
    if not chains:
        return None
    return Deferred(
        tuple(chains),
        tuple(chain.start.meta["layout"] for chain in chains.values()),
        _without(local.backward, chains),
        _resumed(local.backward, chains),
    )


def _unwritten(chains: dict[int, _Chain], local: LocalProgram) -> dict[int, _Chain]:
    """Return those into whose start nobody writes: it was read by its reduction alone, and now is handed out."""
    assert local.backward is not None
    memories = Memories(local.backward.graph, Setting(local.mesh, (), ()))
    before: dict[fx.Node, int] = {node: index for index, node in enumerate(local.backward.graph.nodes)}
    writes = [(node, operand) for node in before for operand in written_operands(node)]

    def is_written(chain: _Chain) -> bool:
        return any(
            before[node] > before[chain.start] and node not in chain.nodes and memories.same(operand, chain.start)
            for node, operand in writes
        )

    return {position: chain for position, chain in chains.items() if not is_written(chain)}


def _chain(end: fx.Node, scattered: bool) -> _Chain | None:
    """Return the reductions that end in a gradient and that nothing else reads; None if there are none."""
    nodes: list[fx.Node] = []
    node: fx.Node = end
    reader: Any = end
    while "arc" in node.meta:
        if [user for user in node.users if user.op != "output"] not in ([], [reader]):
            return None
        nodes.append(node)
        before = _operand(node, scattered)
        if before is None:
            return None
        reader = node.args[0] if is_getitem(node) else node
        node = before
    sums = all(code in (PARTIAL_SUM, after) for code, after in zip(node.meta.get("layout", ()), end.meta["layout"]))
    return _Chain(node, nodes[-1], tuple(nodes)) if nodes and sums and "layout" in node.meta else None


def _operand(node: fx.Node, scattered: bool) -> fx.Node | None:
    """Return what a node of a reduction works on, None for a node of anything else."""
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return None
    if node.target in (WAIT, torch.ops.aten.contiguous.default):
        return source
    calls = collective_calls(source if is_getitem(node) else node)
    if not calls:  # what lays pieces in order around a reduce-scatter
        return source if scattered and not is_getitem(node) and node.all_input_nodes == [source] else None
    call = calls[int(node.args[1])] if is_getitem(node) else calls[0]  # type: ignore[arg-type]
    kinds = ("all_reduce", "reduce_scatter") if scattered else ("all_reduce",)
    return call.operand if call.kind in kinds and call.arguments[0] == "sum" else None


def _copy(backward: fx.GraphModule) -> tuple[fx.Graph, dict[fx.Node, fx.Node], list[Any]]:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(backward.graph, copies)
    return graph, copies, list(results)  # type: ignore[arg-type]


def _without(backward: fx.GraphModule, chains: dict[int, _Chain]) -> fx.GraphModule:
    graph, copies, results = _copy(backward)
    for position, chain in chains.items():
        results[position] = copies[chain.start]
    graph.output(tuple(results))
    left = [copies[node] for chain in chains.values() for node in chain.nodes]
    buckets = [copies[node] for node in backward.graph.nodes if is_coalesced(node)]
    while left:
        for node in [node for node in left if not node.users]:
            left.remove(node)
            graph.erase_node(node)
        for bucket in buckets:
            _shrink(bucket)
    for bucket in buckets:
        if not bucket.users:
            graph.erase_node(bucket)
    return GraphOnly(backward, graph)


def _shrink(bucket: fx.Node) -> None:
    """Leave out of a collective of several tensors those whose result nobody reads."""
    parts = sorted(bucket.users, key=lambda part: int(part.args[1]))  # type: ignore[arg-type]
    kept = [int(part.args[1]) for part in parts]  # type: ignore[arg-type]
    bucket.args = ([bucket.args[0][index] for index in kept], *bucket.args[1:])  # type: ignore[index,misc]
    for key in ("val", "members"):
        bucket.meta[key] = [bucket.meta[key][index] for index in kept]
    for place, part in enumerate(parts):
        part.args = (bucket, place)


def _resumed(backward: fx.GraphModule, chains: dict[int, _Chain]) -> fx.GraphModule:
    graph, copies, results = _copy(backward)
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for chain in reversed(chains.values()):
        start, head = copies[chain.start], copies[chain.head]
        with graph.inserting_after(last):
            earlier = graph.placeholder(f"{start.name}_earlier")
        earlier.meta = dict(start.meta)
        with graph.inserting_after(earlier if start.op == "placeholder" else start):
            total = graph.call_function(_ADD, (start, earlier))
        total.meta = dict(start.meta)
        if is_getitem(head):
            bucket, place = head.args
            operands = list(bucket.args[0])  # type: ignore[union-attr,arg-type]
            operands[place] = total  # type: ignore[index,call-overload]
            bucket.args = (operands, *bucket.args[1:])  # type: ignore[union-attr]
        else:
            head.replace_input_with(start, total)
    graph.output(tuple(results))
    return GraphOnly(backward, graph)
