"""Bring nodes into the order of given keys, as far as what they read allows."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import pairwise

from torch import fx

from ..program import touches_generator
from .edits import Reorder

Key = tuple[float, ...]


def sort_nodes(graph: fx.Graph, keys: Mapping[fx.Node, Key]) -> list[Reorder]:
    """Return the order in which every op comes by its key, but behind what it reads; none if that is the order now.

    An op without a key has its position. Phases stay apart, and what touches the random generator keeps its order.
    """
    numbered = [(index, node) for index, node in enumerate(graph.nodes) if node.op not in ("placeholder", "output")]
    ops = [node for _, node in numbered]
    rank = {node: (node.meta["phase"] != "forward", *keys.get(node, (index,)), index) for index, node in numbered}
    inside = set(ops)
    waits = {node: {source for source in node.all_input_nodes if source in inside} for node in ops}
    random = [node for node in ops if touches_generator(node)]
    for one, other in pairwise(random):
        waits[other].add(one)
    readers: dict[fx.Node, list[fx.Node]] = {node: [] for node in ops}
    for node, sources in waits.items():
        for source in sources:
            readers[source].append(node)
    missing = {node: len(sources) for node, sources in waits.items()}
    heap = [(rank[node], node.name, node) for node in ops if not missing[node]]
    heapq.heapify(heap)
    order: list[fx.Node] = []
    while heap:
        node = heapq.heappop(heap)[-1]
        order.append(node)
        for reader in readers[node]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(heap, (rank[reader], reader.name, reader))
    assert len(order) == len(ops), "the edits of a pass made a cycle"
    return [] if order == ops else [Reorder(tuple(node.name for node in order))]
