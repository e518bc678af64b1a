"""The graph of all layouts of one tensor: which there are, what a piece weighs, and what each arc costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import shortest_path

from autopar.mesh import Mesh
from autopar.placement import PARTIAL_SUM, REPLICATE, Layout, pieces_nonempty

from ..cost.collectives import Company, bucketed_seconds
from ..cost.devices import Device, Link, device, mesh_links
from ..redistribution import arc_kind

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

HOP_S = 1e-13
"""What an arc weighs besides its price when two ways cost the same: the one of fewer arcs is taken."""

_SHIFT = 6
_OFFSET = 8
_BITS = (1 << _SHIFT) - 1


def encode(layout: Layout) -> int:
    """Return a layout as one int, which sorts and compares fast in arrays."""
    return sum((code + _OFFSET) << (_SHIFT * axis) for axis, code in enumerate(layout))


def encode_columns(columns: Sequence[Ints]) -> Ints:
    """Return the encoded layouts of which ``columns[axis]`` holds the placement codes on one axis."""
    total = np.zeros(len(columns[0]) if columns else 1, dtype=np.int64)
    for axis, codes in enumerate(columns):
        total += (codes.astype(np.int64) + _OFFSET) << (_SHIFT * axis)
    return total


def decode(value: int, num_axes: int) -> Layout:
    """Return the layout that ``encode`` made an int of."""
    return tuple(((int(value) >> (_SHIFT * axis)) & _BITS) - _OFFSET for axis in range(num_axes))


def piece_lengths(size: int, sizes: Sequence[int]) -> Ints:
    """Return the largest piece of ``size`` for every subset of axes that splits it (a bit an axis)."""
    out = []
    for subset in range(1 << len(sizes)):
        length = size
        for axis, parts in enumerate(sizes):
            if subset >> axis & 1:
                length = -(-length // parts)
        out.append(length)
    return np.array(out, dtype=np.int64)


def piece_legality(size: int, sizes: Sequence[int], even: bool = False) -> Bools:
    """Tell for every subset of axes whether ``size`` may be split by it: no empty piece, and equal ones if ``even``."""
    out = []
    for subset in range(1 << len(sizes)):
        parts = [sizes[axis] for axis in range(len(sizes)) if subset >> axis & 1]
        legal = pieces_nonempty(size, parts) if parts else True
        out.append(legal and not (even and size % int(np.prod(parts, dtype=np.int64))))
    return np.array(out, dtype=np.bool_)


@dataclass(frozen=True)
class Prices:
    """The mesh with the device and the links that its arcs are priced on."""

    mesh: Mesh
    device: Device
    links: tuple[Link, ...]

    @classmethod
    def of(cls, mesh: Mesh) -> Prices:
        """Return the prices of a mesh by its own profiles."""
        return cls(mesh, device(mesh.device), mesh_links(mesh))


@dataclass(eq=False)
class LayoutGraph:
    """All legal layouts of a tensor of one shape and all arcs between them.

    Attributes:
        shape, itemsize: of the tensor.
        layouts: encoded layouts, one a node.
        index: encoded layout -> node.
        numel: elements of the largest rank's piece.
        complete: the layout has no partial value.
        source, target: nodes of every arc.
        axis: of every arc.
        seconds: price of every arc.
    """

    shape: tuple[int, ...]
    itemsize: int
    layouts: Ints
    numel: Ints
    complete: Bools
    source: Ints
    target: Ints
    axis: Ints
    seconds: Floats
    index: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.index = {int(value): i for i, value in enumerate(self.layouts)}

    def __len__(self) -> int:
        return len(self.layouts)

    def nodes(self, encoded: Ints) -> Ints:
        """Return the node of every encoded layout; -1 for one that is not legal."""
        order = self._order
        at = np.searchsorted(self.layouts, encoded, sorter=order)
        at = np.minimum(at, len(order) - 1)
        found = order[at]
        return np.where(self.layouts[found] == encoded, found, -1)

    @cached_property
    def _order(self) -> Ints:
        return np.argsort(self.layouts, kind="stable")

    @cached_property
    def _ways(self) -> tuple[Floats, Ints]:
        weights = csr_matrix((self.seconds + HOP_S, (self.source, self.target)), shape=(len(self), len(self)))
        dist, before = shortest_path(weights, method="D", directed=True, return_predecessors=True)
        return dist, before.astype(np.int64)

    @property
    def before(self) -> Ints:
        """Node before the last on the cheapest way, ``[source, target]``; negative at the source or where none is."""
        return self._ways[1]

    @cached_property
    def dist_s(self) -> Floats:
        """Seconds of the cheapest way between any two nodes; infinite where there is none."""
        out = np.full((len(self), len(self)), np.inf)
        np.fill_diagonal(out, 0.0)
        out[self.source, self.target] = self.seconds
        for middle in range(len(self)):
            np.minimum(out, out[:, middle, None] + out[None, middle, :], out=out)
        return out

    @property
    def dist(self) -> Floats:
        """Seconds of the cheapest way between any two nodes, plus ``HOP_S`` an arc; infinite where there is none."""
        return self._ways[0]

    @cached_property
    def seconds_between(self) -> dict[tuple[int, int], float]:
        """Price of the arc between two nodes."""
        return {
            (int(a), int(b)): float(price) for a, b, price in zip(self.source, self.target, self.seconds, strict=True)
        }

    def way(self, source: int, target: int) -> list[tuple[int, int]]:
        """Return the arcs, as pairs of nodes, of the cheapest way."""
        before = self._ways[1]
        out = []
        while target != source:
            last = int(before[source, target])
            out.append((last, target))
            target = last
        return out[::-1]


class LayoutGraphs:
    """Makes layout graphs and keeps them: tensors of one shape and item size share theirs."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self._made: dict[tuple[Any, ...], LayoutGraph] = {}

    def graph(
        self, shape: tuple[int, ...], itemsize: int, partials: tuple[int, ...], *, company: Company | None = None
    ) -> LayoutGraph:
        """Return the graph of a tensor; its layouts may hold the ``partials`` codes (sorted) beside complete ones.

        Args:
            shape, itemsize: of the tensor.
            partials: codes.
            company: what it travels with as one; None for one that travels alone.
        """
        key = (shape, itemsize, partials, company)
        if key not in self._made:
            self._made[key] = _build(shape, itemsize, partials, self.prices, company)
        return self._made[key]


def _build(
    shape: tuple[int, ...], itemsize: int, partials: tuple[int, ...], prices: Prices, company: Company | None
) -> LayoutGraph:
    sizes = prices.mesh.sizes
    codes = [
        [REPLICATE, *(d for d, n in enumerate(shape) if n > 1), *partials] if n > 1 else [REPLICATE] for n in sizes
    ]
    grid = np.meshgrid(*(np.array(row, dtype=np.int64) for row in codes), indexing="ij")
    columns = [part.ravel() for part in grid]
    legal, numel = _weigh(shape, sizes, columns)
    kinds = np.stack([np.any([col == p for col in columns], axis=0) for p in partials] or [np.zeros_like(legal)])
    legal &= kinds.sum(axis=0) <= 1
    position = np.where(legal, np.cumsum(legal) - 1, -1)
    arcs = _arcs(codes, columns, position)
    columns, numel = [col[legal] for col in columns], numel[legal]
    seconds = np.zeros(len(arcs), dtype=np.float64)
    for axis, link in enumerate(prices.links):
        for begin in codes[axis]:
            for end in codes[axis]:
                kind = arc_kind(begin, end)
                rows = (arcs[:, 2] == axis) & (columns[axis][arcs[:, 0]] == begin) & (columns[axis][arcs[:, 1]] == end)
                if kind is None or not rows.any():
                    continue
                padded = numel[arcs[rows, 0]]
                if kind in ("reduce_scatter", "all_to_all"):
                    starts, ends = ([col[arcs[rows, side]] for col in columns] for side in (0, 1))
                    padded = (
                        padded // _lengths(shape, sizes, starts, end) * sizes[axis] * _lengths(shape, sizes, ends, end)
                    )
                bytes_in = (padded * itemsize).astype(np.float64)
                seconds[rows] = bucketed_seconds(
                    kind, sizes[axis], bytes_in, begin, end, link, prices.device, company=company
                )
    complete = np.all([col > PARTIAL_SUM for col in columns], axis=0)
    return LayoutGraph(
        shape, itemsize, encode_columns(columns), numel, complete, arcs[:, 0], arcs[:, 1], arcs[:, 2], seconds
    )


def _weigh(shape: tuple[int, ...], sizes: Sequence[int], columns: list[Ints]) -> tuple[Bools, Ints]:
    legal = np.ones(len(columns[0]), dtype=np.bool_)
    numel = np.ones(len(columns[0]), dtype=np.int64)
    for dim, size in enumerate(shape):
        legal &= piece_legality(size, sizes)[_subsets(columns, dim)]
        numel *= _lengths(shape, sizes, columns, dim)
    return legal, numel


def _subsets(columns: list[Ints], dim: int) -> Ints:
    """Return, for every layout, the axes that split ``dim``, as bits."""
    bits = [(col == dim).astype(np.int64) << axis for axis, col in enumerate(columns)]
    subsets: Ints = np.sum(bits, axis=0, dtype=np.int64)
    return subsets


def _lengths(shape: Sequence[int], sizes: Sequence[int], columns: list[Ints], dim: int) -> Ints:
    """Return, for every layout, the length of ``dim`` in the largest rank's piece."""
    return piece_lengths(shape[dim], sizes)[_subsets(columns, dim)]


def _arcs(codes: list[list[int]], columns: list[Ints], position: Ints) -> Ints:
    """Return ``(source, target, axis)`` rows: one axis changes, and no later axis splits a dim that the arc touches."""
    total = len(columns[0])
    out = [np.zeros((0, 3), dtype=np.int64)]
    stride = total
    for axis, row in enumerate(codes):
        stride //= len(row)
        for i, begin in enumerate(row):
            starts = np.flatnonzero(columns[axis] == begin)
            for j, end in enumerate(row):
                if arc_kind(begin, end) is None:
                    continue
                ends = starts + (j - i) * stride
                keep = (position[starts] >= 0) & (position[ends] >= 0)
                for later in columns[axis + 1 :]:
                    keep &= (later[starts] != begin) | (begin < 0)
                    keep &= (later[starts] != end) | (end < 0)
                pairs = np.stack([position[starts[keep]], position[ends[keep]], np.full(int(keep.sum()), axis)], axis=1)
                out.append(pairs)
    return np.concatenate(out)
