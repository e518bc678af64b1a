"""Arcs: the single collectives, each on one axis, that take a tensor from one layout to another."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from autopar.errors import LoweringError
from autopar.placement import (
    PARTIAL_SUM,
    REPLICATE,
    Layout,
    is_partial,
    layout_name,
    pieces_nonempty,
)


@dataclass(frozen=True, order=True)
class Arc:
    """One collective on one axis.

    Attributes:
        source, target: layouts that differ on ``axis`` alone.
        axis: the mesh axis.
        kind: ``all_gather`` (S->R), ``all_reduce`` (P->R), ``reduce_scatter`` (P->S), ``all_to_all`` (S->S),
            ``slice`` (R->S, no communication).
    """

    source: Layout
    target: Layout
    axis: int
    kind: str

    def __str__(self) -> str:
        return f"{layout_name(self.source)}->{layout_name(self.target)} by {self.kind} on axis {self.axis}"


def layout_is_legal(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> bool:
    """Tell whether a tensor may lie in a layout: dims exist, and no rank holds an empty piece of a split dim."""
    for dim in {code for code in layout if code >= 0}:
        if dim >= len(shape):
            return False
        if not pieces_nonempty(shape[dim], [sizes[a] for a, code in enumerate(layout) if code == dim]):
            return False
    return True


def arc_kind(source: int, target: int) -> str | None:
    """Return the collective from one placement to another on one axis; None if there is none or nothing to do."""
    if source == target or is_partial(target):
        return None
    if is_partial(source):
        if target == REPLICATE:
            return "all_reduce"
        return "reduce_scatter" if source == PARTIAL_SUM else None
    if source == REPLICATE:
        return "slice"
    return "all_gather" if target == REPLICATE else "all_to_all"


def arc_between(source: Layout, target: Layout) -> Arc | None:
    """Return the arc from ``source`` to ``target``, or None when they are not one legal collective apart.

    Two axes that split one dim have an order (the earlier is the outer one). A collective on ``axis`` that starts or
    ends with a shard of a dim needs that no later axis splits the same dim: the pieces would interleave.
    """
    changed = [axis for axis, (a, b) in enumerate(zip(source, target, strict=True)) if a != b]
    if len(changed) != 1:
        return None
    axis = changed[0]
    kind = arc_kind(source[axis], target[axis])
    if kind is None:
        return None
    touched = {code for code in (source[axis], target[axis]) if code >= 0}
    if any(code in touched for code in source[axis + 1 :]):
        return None
    return Arc(source, target, axis, kind)


@lru_cache(maxsize=65536)
def arcs_from(layout: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Arc, ...]:
    """Return every arc that leaves ``layout`` for a tensor of a global ``shape`` on a mesh of ``sizes``."""
    out = []
    for axis, code in enumerate(layout):
        if sizes[axis] == 1:
            continue
        for target in (REPLICATE, *range(len(shape))):
            if target == code:
                continue
            end = (*layout[:axis], target, *layout[axis + 1 :])
            arc = arc_between(layout, end)
            if arc is not None and layout_is_legal(shape, end, sizes):
                out.append(arc)
    return tuple(out)


ArcPrice = Callable[[Arc], float]


def route(
    shape: Sequence[int], sizes: Sequence[int], sources: Iterable[Layout], target: Layout, price: ArcPrice
) -> list[Arc]:
    """Return the cheapest arcs from any of ``sources`` to ``target``; an empty list when it is one of them.

    Ties go to fewer arcs, then to the smaller layout, so the answer does not depend on the order of ``sources``.

    Raises:
        LoweringError: there is no way (only a complete value can be asked for: nothing leads to a partial one).
    """
    shape, sizes = tuple(shape), tuple(sizes)
    starts = sorted(set(sources))
    best: dict[Layout, tuple[float, int]] = dict.fromkeys(starts, (0.0, 0))
    came: dict[Layout, Arc] = {}
    queue: list[tuple[float, int, Layout]] = [(0.0, 0, layout) for layout in starts]
    heapq.heapify(queue)
    while queue:
        cost, hops, layout = heapq.heappop(queue)
        if (cost, hops) > best[layout]:
            continue
        if layout == target:
            break
        for arc in arcs_from(layout, shape, sizes):
            offer = (cost + price(arc), hops + 1)
            if arc.target not in best or offer < best[arc.target]:
                best[arc.target] = offer
                came[arc.target] = arc
                heapq.heappush(queue, (*offer, arc.target))
    if target not in best:
        names = " or ".join(layout_name(layout) for layout in starts)
        raise LoweringError(f"a tensor of shape {shape} can't go from {names} to {layout_name(target)}")
    path: list[Arc] = []
    layout = target
    while layout in came:
        path.append(came[layout])
        layout = came[layout].source
    return path[::-1]
