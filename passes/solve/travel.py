"""The cheapest way for one tensor from where it starts to every layout that is demanded: a Steiner arborescence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.errors import AutoparError

from .layout_graph import Floats, Ints, LayoutGraph

MAX_TERMINALS = 12


@dataclass(frozen=True)
class Travel:
    """How a tensor travels: arcs between nodes of its layout graph, each starting where the tensor already is.

    Attributes:
        source: where it starts.
        early: arcs in its own phase.
        saved: nodes kept for the backward.
        late: arcs in the backward, starting from ``saved``.
        seconds: of all arcs.
    """

    source: int
    early: tuple[tuple[int, int], ...]
    saved: tuple[int, ...]
    late: tuple[tuple[int, int], ...]
    seconds: float

    def saved_bytes(self, graph: LayoutGraph) -> int:
        """Return the bytes of all that is kept."""
        return sum(int(graph.numel[node]) * graph.itemsize for node in self.saved)


def cheapest_travel(
    graph: LayoutGraph,
    source: int,
    early: list[int],
    late: list[int],
    saved: list[int] | None,
    *,
    resting: bool = False,
    again: bool = False,
) -> Travel:
    """Return the cheapest arcs that bring a tensor from ``source`` to all demanded nodes.

    Args:
        graph: layouts and arcs.
        source: where the tensor starts.
        early: nodes demanded in its own phase.
        late: nodes demanded in the backward.
        saved: nodes that may be kept for it; None when memory is free: then everything had in the forward is there,
            and what the backward starts from is kept.
        resting: the backward has the tensor in ``source`` without keeping anything.
        again: the backward computes the tensor again, in ``source``.
    """
    if not late:
        arcs = _arborescence(graph.dist, source, early, graph.way)
        return Travel(source, _ordered(arcs, [source]), (), (), _seconds(graph, arcs))
    if again:
        first, second = (_arborescence(graph.dist, source, ends, graph.way) for ends in (early, late))
        seconds = _seconds(graph, first) + _seconds(graph, second)
        return Travel(source, _ordered(first, [source]), (), _ordered(second, [source]), seconds)
    if saved is None:
        return _free_travel(graph, source, early, late, resting)
    count = len(graph)
    free = [source] if resting else []
    crossings = sorted({*saved, *free})
    through = np.full((count, count), np.inf)
    for node in saved:
        through = np.minimum(through, graph.dist[:, node, None] + graph.dist[None, node, :])
    if resting:
        through[source] = np.minimum(through[source], graph.dist[source])
    dist = np.block([[graph.dist, through], [np.full((count, count), np.inf), graph.dist]])

    def way(begin: int, end: int) -> list[tuple[int, int]]:
        if (begin < count) == (end < count):
            shift = 0 if begin < count else count
            return [(a + shift, b + shift) for a, b in graph.way(begin - shift, end - shift)]
        here = crossings if begin == source else saved
        middle = min(here, key=lambda node: (graph.dist[begin, node] + graph.dist[node, end - count], node))
        behind = [(a + count, b + count) for a, b in graph.way(middle, end - count)]
        return [*graph.way(begin, middle), (middle, middle + count), *behind]

    arcs = _arborescence(dist, source, early + [node + count for node in late], way)
    starts = sorted(a for a, b in arcs if a < count <= b)
    first = [(a, b) for a, b in arcs if b < count]
    second = [(a - count, b - count) for a, b in arcs if a >= count]
    seconds = _seconds(graph, first) + _seconds(graph, second)
    kept = tuple(node for node in starts if node not in free)
    return Travel(source, _ordered(first, [source]), kept, _ordered(second, starts), seconds)


def _free_travel(graph: LayoutGraph, source: int, early: list[int], late: list[int], resting: bool) -> Travel:
    """Keep everything: the backward starts from what the forward had; what rests is cut again, for nothing."""
    cut = [node for node in late if resting and graph.dist_s[source, node] == 0.0]
    wanted = sorted({*early, *(node for node in late if node not in cut)})
    arcs = _arborescence(graph.dist, source, wanted, graph.way)
    parent = {b: a for a, b in arcs}
    first = set()
    for node in early:
        while node != source:
            first.add((parent[node], node))
            node = parent[node]
    had = {source} | {b for _, b in first}
    second = [arc for arc in arcs if arc not in first]
    starts = {a for a, _ in second if a in had} | {node for node in late if node in had and node not in cut}
    early_arcs = _ordered([arc for arc in arcs if arc in first], [source])
    again = [arc for arc in _arborescence(graph.dist, source, cut, graph.way) if arc not in second]
    kept = tuple(sorted(starts - {source} if resting else starts))
    late_arcs = _ordered(second + again, [*kept, source] if resting else list(kept))
    return Travel(source, early_arcs, kept, late_arcs, _seconds(graph, arcs))


def _seconds(graph: LayoutGraph, arcs: list[tuple[int, int]]) -> float:
    return sum(graph.seconds_between[arc] for arc in arcs)


def _ordered(arcs: list[tuple[int, int]], had: list[int]) -> tuple[tuple[int, int], ...]:
    """Return the arcs so that each starts where the tensor already is."""
    here, left, out = set(had), sorted(arcs), []
    while left:
        ready = [arc for arc in left if arc[0] in here]
        if not ready:
            raise AutoparError(f"arcs {left} start nowhere: {sorted(here)} is had")
        out += ready
        here.update(b for _, b in ready)
        left = [arc for arc in left if arc not in ready]
    return tuple(out)


def _arborescence(dist: Floats, source: int, terminals: list[int], way) -> list[tuple[int, int]]:  # type: ignore[no-untyped-def]
    """Return the arcs of the cheapest tree (Dreyfus and Wagner, Networks 1 (1971) 195, directed)."""
    ends = [node for node in terminals if node != source]
    if not ends:
        return []
    if len(ends) > MAX_TERMINALS:
        raise AutoparError(
            f"{len(ends)} layouts of one tensor are demanded at once; at most {MAX_TERMINALS} are handled"
        )
    legs: list[tuple[int, int]] = []
    if len(ends) == 1:
        legs = [(source, ends[0])]
    else:
        best, split, via = _grow(dist, ends)
        _trace((1 << len(ends)) - 1, source, ends, split, via, legs)
        if not np.isfinite(best[-1][source]):
            raise AutoparError(f"node {source} can't reach all of {ends}")
    arcs = dict.fromkeys(arc for begin, end in legs for arc in way(begin, end))
    return _pruned(list(arcs), source, ends)


def _grow(dist: Floats, ends: list[int]) -> tuple[list[Floats], list[Ints], list[Ints]]:
    full = 1 << len(ends)
    best: list[Floats] = [np.zeros(0)] * full
    split: list[Ints] = [np.zeros(0, dtype=np.int64)] * full
    via: list[Ints] = [np.zeros(0, dtype=np.int64)] * full
    for mask in range(1, full):
        if mask & (mask - 1) == 0:
            best[mask] = dist[:, ends[mask.bit_length() - 1]]
            continue
        joined = np.full(len(dist), np.inf)
        chosen = np.zeros(len(dist), dtype=np.int64)
        part = (mask - 1) & mask
        while part:
            if part > mask ^ part:
                offer = best[part] + best[mask ^ part]
                better = offer < joined
                joined[better], chosen[better] = offer[better], part
            part = (part - 1) & mask
        total = dist + joined[None, :]
        split[mask] = chosen
        via[mask] = total.argmin(axis=1)
        best[mask] = total.min(axis=1)
    return best, split, via


def _trace(
    mask: int, node: int, ends: list[int], split: list[Ints], via: list[Ints], legs: list[tuple[int, int]]
) -> None:
    if mask & (mask - 1) == 0:
        legs.append((node, ends[mask.bit_length() - 1]))
        return
    middle = int(via[mask][node])
    legs.append((node, middle))
    part = int(split[mask][middle])
    _trace(part, middle, ends, split, via, legs)
    _trace(mask ^ part, middle, ends, split, via, legs)


def _pruned(arcs: list[tuple[int, int]], source: int, ends: list[int]) -> list[tuple[int, int]]:
    """Return the arcs with one way in at most for every node (the first found), those that lead nowhere left out."""
    out = []
    seen, queue = {source}, [source]
    while queue:
        node = queue.pop(0)
        for arc in arcs:
            if arc[0] == node and arc[1] not in seen:
                seen.add(arc[1])
                queue.append(arc[1])
                out.append(arc)
    parent = {b: a for a, b in out}
    used = set()
    for node in ends:
        while node != source and (parent[node], node) not in used:
            used.add((parent[node], node))
            node = parent[node]
    return [arc for arc in out if arc in used]
