"""Write one arc (a collective on one axis) as explicit nodes: pad, move, communicate, move back, trim."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.mesh import Coordinate
from autopar.passes.local_program import GROUP_PREFIX
from autopar.passes.redistribution import Arc
from autopar.placement import PARTIAL_NAMES, chunk, dim_cuts, local_range, local_shape

Shape = tuple[int, ...]
Emit = Callable[[Any, tuple[Any, ...], Shape, torch.dtype], Any]
"""``emit(target, args, shape, dtype) -> handle`` adds one node of a known local shape."""

_ATEN: Any = torch.ops.aten
_C10D: Any = torch.ops._c10d_functional

COLLECTIVES: dict[Any, str] = {
    _C10D.all_gather_into_tensor.default: "all_gather",
    _C10D.all_reduce.default: "all_reduce",
    _C10D.reduce_scatter_tensor.default: "reduce_scatter",
    _C10D.all_to_all_single.default: "all_to_all",
}
"""Op -> the kind of arc that it carries out."""


@dataclass(frozen=True)
class Cut:
    """How one axis cuts one dim inside the pieces that the outer axes leave.

    Attributes:
        dim: the tensor dim.
        parts: ranks of the axis.
        whole: the dim's length in this rank's group, before the cut.
        step: the longest piece of this group; all pieces are padded to it when the cut is not even.
        start, length: this rank's own piece within ``whole``.
        even: no group of the mesh has unequal pieces, so no rank pads. The same on every rank.
    """

    dim: int
    parts: int
    whole: int
    step: int
    start: int
    length: int
    even: bool


def cut_of(shape: Sequence[int], arc: Arc, dim: int, sizes: Sequence[int], coordinate: Coordinate) -> Cut:
    """Return how ``arc.axis`` cuts ``dim`` of a tensor of a global ``shape``."""
    parts = sizes[arc.axis]
    outer = dim_cuts(arc.source[: arc.axis], dim, sizes, coordinate)
    whole = local_range(shape[dim], outer)[1]
    start, length = chunk(whole, parts, coordinate[arc.axis])
    lengths = {shape[dim]}
    for count, _ in outer:
        lengths = {chunk(n, count, index)[1] for n in lengths for index in range(count)}
    return Cut(dim, parts, whole, -(-whole // parts), start, length, all(n % parts == 0 for n in lengths))


def arc_bytes(shape: Sequence[int], itemsize: int, arc: Arc, sizes: Sequence[int]) -> int:
    """Return the bytes that the fullest rank hands to the collective of ``arc``, padding included; 0 for a slice."""
    if arc.kind == "slice":
        return 0
    local = list(local_shape(shape, arc.source, sizes, (0,) * len(sizes)))
    target, parts = arc.target[arc.axis], sizes[arc.axis]
    if target >= 0:
        local[target] = -(-local[target] // parts) * parts
    return math.prod(local) * itemsize


def insert_arc(
    arc: Arc,
    value: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    sizes: Sequence[int],
    coordinate: Coordinate,
    emit: Emit,
) -> Any:
    """Emit the nodes that take ``value``, this rank's piece under ``arc.source``, to its piece under ``arc.target``.

    What it yields is contiguous: kernels of statistics (a layer norm's mean, an attention's normaliser) read their
    operands as if they were, and a slice is not.

    Args:
        shape: the global shape.
        emit: adds a node. Which ops are emitted, and in which order, is the same on every rank.
    """
    tensor = _Moving(value, local_shape(shape, arc.source, sizes, coordinate), dtype, f"{GROUP_PREFIX}{arc.axis}", emit)
    source, target = arc.source[arc.axis], arc.target[arc.axis]
    gathered = cut_of(shape, arc, source, sizes, coordinate) if source >= 0 else None
    split = cut_of(shape, arc, target, sizes, coordinate) if target >= 0 else None
    if arc.kind == "slice" and split:
        return tensor.narrow(split.dim, split.start, split.length).value
    if arc.kind == "all_gather" and gathered:
        return tensor.all_gather(gathered).value
    if arc.kind == "reduce_scatter" and split:
        return tensor.reduce_scatter(split).value
    if arc.kind == "all_to_all" and gathered and split:
        return tensor.all_to_all(gathered, split).value
    return tensor.all_reduce(PARTIAL_NAMES[source]).value


@dataclass
class _Moving:
    """A local tensor on its way: a handle with its shape; every method emits nodes and returns what they yield."""

    value: Any
    shape: Shape
    dtype: torch.dtype
    group: str
    emit: Emit

    def _next(self, target: Any, shape: Sequence[int], *args: Any, dtype: torch.dtype | None = None) -> _Moving:
        shape, dtype = tuple(shape), dtype or self.dtype
        return _Moving(self.emit(target, (self.value, *args), shape, dtype), shape, dtype, self.group, self.emit)

    def narrow(self, dim: int, start: int, length: int) -> _Moving:
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        cut = self._next(_ATEN.slice.Tensor, shape, dim, start, start + length)
        return cut._next(_ATEN.contiguous.default, shape) if dim else cut

    def pad(self, dim: int, length: int) -> _Moving:
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        widths = [0, 0] * (len(shape) - 1 - dim) + [0, length - self.shape[dim]]
        return self._next(_ATEN.constant_pad_nd.default, shape, widths)

    def reshape(self, shape: Sequence[int]) -> _Moving:
        return self._next(_ATEN.reshape.default, shape, list(shape))

    def movedim(self, source: int, target: int) -> _Moving:
        order = [i for i in range(len(self.shape)) if i != source]
        order.insert(target, source)
        return self._next(_ATEN.permute.default, [self.shape[i] for i in order], order)

    def cast(self, dtype: torch.dtype) -> _Moving:
        return self._next(_ATEN.to.dtype, self.shape, dtype, dtype=dtype)

    def communicate(self, target: Any, shape: Sequence[int], *args: Any) -> _Moving:
        if self.dtype.is_complex:
            # Backends do not know all of complex numbers, and send what is lazily conjugated as it is in memory.
            plain = self._next(_ATEN.resolve_conj.default, self.shape)
            parts = plain._next(_ATEN.view_as_real.default, (*self.shape, 2), dtype=self.dtype.to_real())
            moved = parts.communicate(target, (*shape, 2), *args)
            return moved._next(_ATEN.view_as_complex.default, shape, dtype=self.dtype)
        whole = self._next(_ATEN.contiguous.default, self.shape)
        return whole._next(target, shape, *args, self.group)._next(_C10D.wait_tensor.default, shape)

    def pieces_first(self, cut: Cut) -> _Moving:
        """Cut ``cut.dim`` into ``parts`` equal pieces and stack them along a new first dim."""
        dim, parts = cut.dim, cut.parts
        padded = self if cut.even else self.pad(dim, parts * cut.step)
        apart = padded.reshape([*self.shape[:dim], parts, cut.step, *self.shape[dim + 1 :]])
        return apart.movedim(dim, 0) if dim else apart

    def pieces_joined(self, cut: Cut) -> _Moving:
        """Join pieces, stacked along the first dim, along ``cut.dim``; the inverse of ``pieces_first``."""
        dim, piece = cut.dim, self.shape[1:]
        apart = self.movedim(0, dim) if dim else self
        joined = apart.reshape([*piece[:dim], cut.parts * cut.step, *piece[dim + 1 :]])
        whole = joined if cut.even else joined.narrow(dim, 0, cut.whole)
        return whole._next(_ATEN.contiguous.default, whole.shape) if dim and cut.even else whole

    def all_reduce(self, op: str) -> _Moving:
        if self.dtype == torch.bool:
            return self.cast(torch.uint8).all_reduce(op).cast(torch.bool)
        return self.communicate(_C10D.all_reduce.default, self.shape, op)

    def all_gather(self, cut: Cut) -> _Moving:
        piece = self if cut.even else self.pad(cut.dim, cut.step)
        shape = (cut.parts * piece.shape[0], *piece.shape[1:])
        gathered = piece.communicate(_C10D.all_gather_into_tensor.default, shape, cut.parts)
        if cut.dim == 0:
            return gathered if cut.even else gathered.narrow(0, 0, cut.whole)
        return gathered.reshape((cut.parts, *piece.shape)).pieces_joined(cut)

    def reduce_scatter(self, cut: Cut) -> _Moving:
        if cut.dim == 0:
            piece: Shape = (cut.step, *self.shape[1:])
            flat = self if cut.even else self.pad(0, cut.parts * cut.step)
        else:
            pieces = self.pieces_first(cut)
            piece = pieces.shape[1:]
            flat = pieces.reshape((cut.parts * piece[0], *piece[1:]))
        scattered = flat.communicate(_C10D.reduce_scatter_tensor.default, piece, "sum", cut.parts)
        return scattered if cut.even else scattered.narrow(cut.dim, 0, cut.length)

    def all_to_all(self, gathered: Cut, split: Cut) -> _Moving:
        piece = self if gathered.even else self.pad(gathered.dim, gathered.step)
        pieces = piece.pieces_first(split)
        ones = [1] * split.parts
        swapped = pieces.communicate(_C10D.all_to_all_single.default, pieces.shape, ones, ones)
        whole = swapped.pieces_joined(gathered)
        return whole if split.even else whole.narrow(split.dim, 0, split.length)
