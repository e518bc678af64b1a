"""Reads and writes at indices: a split of the indexed dim answers for its own indices alone.

A rank that holds ``length`` entries from ``offset`` on moves the indices by its offset, reads entry 0 for those
outside and puts zero in their place: each index is answered by one rank, so the sum over ranks is exact. Writes that
add do the same to what they add. Indices in front of the whole dim are left to the first rank, those behind it to the
last one, whose op then raises as it does on one device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.passes.rules.form import (
    arguments,
    blocked,
    call_arguments,
    emit_with,
    is_zero,
    letters,
    linear_groups,
    make_rule,
    operand_shapes,
    result_shapes,
    shape_of,
    wrap,
)
from autopar.passes.rules.rule import LocalCall, Piece, Rule
from autopar.passes.rules.table import replicated_rule, rule

aten = torch.ops.aten


def split_piece(call: LocalCall, name: str) -> Piece | None:
    """Return the piece of a factor that is really split, or None."""
    piece = call.pieces.get(name)
    return None if piece is None or piece.parts == 1 else piece


_FAR = 1 << 31


def _bounds(piece: Piece) -> tuple[int, int]:
    """Return from where and up to where moved indices are a piece's own, or its to refuse."""
    first = 0 if piece.offset > 0 else -_FAR
    return first, _FAR - 1 if 0 < piece.length == piece.size - piece.offset else piece.length


def local_index(
    call: LocalCall, index: Any, piece: Piece, *, negative: bool = False, refuse: bool = True
) -> tuple[Any, Any]:
    """Emit the index of a piece's own entries, 0 for others, and the mask of the others.

    Args:
        negative: indices may count from the end of the whole dim.
        refuse: indices that nobody has stay, so that the op raises.
    """
    first, last = _bounds(piece) if refuse else (0, piece.length)
    if negative:
        below = call.emit(aten.lt.Scalar, index, 0)
        wrapped = call.emit(aten.add.Tensor, index, piece.size)
        index = call.emit(aten.where.self, below, wrapped, index)
        first = 0  # the op would count them from the end of the piece
    moved = call.emit(aten.sub.Tensor, index, piece.offset)
    low = call.emit(aten.lt.Scalar, moved, first)
    high = call.emit(aten.ge.Scalar, moved, last)
    outside = call.emit(aten.logical_or.default, low, high)
    return call.emit(aten.masked_fill.Scalar, moved, outside, 0), outside


def _numeric(node: fx.Node) -> bool:
    """Tell whether a result can be a partial sum."""
    return node.meta["val"].dtype is not torch.bool


def _embedding_locally(call: LocalCall) -> Any:
    piece = split_piece(call, "v")
    if piece is None:
        return call.again()
    named = call_arguments(call)
    index, outside = local_index(call, named["indices"], piece)
    rows = emit_with(call, indices=index, padding_idx=-1)
    return call.emit(aten.masked_fill.Scalar, rows, call.emit(aten.unsqueeze.default, outside, -1), 0)


@rule(aten.embedding.default)
def embedding(node: fx.Node) -> Rule:
    """A lookup of rows: the table's rows are a sum, its columns and the indices parallel."""
    indices = operand_shapes(node)[1]
    names = letters(len(indices))
    return make_rule(
        node,
        [["v", "n"], names],
        [[*names, "n"]],
        kinds={"v": "sum"},
        roles={"v": "vocab", "n": "column"},
        linear=linear_groups(node, (0,)),
        localize=_embedding_locally,
    )


def _embedding_backward_locally(call: LocalCall) -> Any:
    named, piece = call_arguments(call), split_piece(call, "v")
    if piece is None:
        return call.again()
    index, outside = local_index(call, named["indices"], piece, refuse=False)  # this op trusts what it is given
    grad = call.emit(aten.masked_fill.Scalar, named["grad_output"], call.emit(aten.unsqueeze.default, outside, -1), 0)
    padding = int(named["padding_idx"])
    inside = piece.offset <= padding < piece.offset + piece.length
    return emit_with(
        call,
        grad_output=grad,
        indices=index,
        num_weights=piece.length,
        padding_idx=padding - piece.offset if inside else -1,
    )


@rule(aten.embedding_dense_backward.default)
def embedding_dense_backward(node: fx.Node) -> Rule:
    """Its gradient: a sum over the indices; rows and columns of the table are parallel."""
    named = arguments(node)
    names = letters(len(shape_of(named["indices"])))
    by_count = bool(named["scale_grad_by_freq"])
    tokens: list[str | None] = [None] * len(names) if by_count else list(names)
    rows = None if by_count else "v"
    return make_rule(
        node,
        [[*tokens, "n"], tokens],
        [[rows, "n"]],
        kinds={str(name): "sum" for name in names},
        roles={"v": "vocab", "n": "column"},
        linear=linear_groups(node, (0,)),
        localize=_embedding_backward_locally,
    )


def _gather_locally(call: LocalCall) -> Any:
    piece = split_piece(call, "v")
    if piece is None:
        return call.again()
    index, outside = local_index(call, call_arguments(call)["index"], piece)
    return call.emit(aten.masked_fill.Scalar, emit_with(call, index=index), outside, 0)


@rule(aten.gather.default)
def gather(node: fx.Node) -> Rule:
    """A read along one dim: that dim is a sum, dims which the index covers whole are parallel."""
    (source, index), rank = operand_shapes(node), len(shape_of(node))
    if not rank:
        return replicated_rule(node, "a gather from a 0-dim tensor")
    dim = wrap(arguments(node)["dim"], rank)
    names = letters(rank)
    shared: list[str | None] = [name if source[i] == index[i] else None for i, name in enumerate(names)]
    read, out = list(shared), list(shared)
    read[dim], out[dim] = "v" if _numeric(node) else None, f"d{dim}"
    return make_rule(
        node, [read, out], [out], kinds={"v": "sum"}, linear=linear_groups(node, (0,)), localize=_gather_locally
    )


def _local_list(call: LocalCall, named: dict[str, Any], piece: Piece) -> tuple[Any, Any]:
    """Emit the list of indices along ``dim`` for a piece, and the mask of the others, shaped to broadcast over rows."""
    index, outside = local_index(call, named["index"], piece)
    rank = len(call.result_shapes[0])
    column = [-1 if i == wrap(named["dim"], rank) else 1 for i in range(rank)]
    return index, call.emit(aten.reshape.default, outside, column)


def _index_select_locally(call: LocalCall) -> Any:
    piece = split_piece(call, "v")
    if piece is None:
        return call.again()
    named = call_arguments(call)
    index, mask = _local_list(call, named, piece)
    return call.emit(aten.masked_fill.Scalar, emit_with(call, index=index), mask, 0)


@rule(aten.index_select.default)
def index_select(node: fx.Node) -> Rule:
    """Rows at a list of indices: the indexed dim is a sum, the list and the other dims are parallel."""
    index, rank = operand_shapes(node)[1], len(shape_of(node))
    if not rank or len(index) != 1:
        return replicated_rule(node, "an index_select of a 0-dim tensor")
    dim, names = wrap(arguments(node)["dim"], rank), letters(rank)
    read: list[str | None] = list(names)
    read[dim] = "v" if _numeric(node) else None
    return make_rule(
        node,
        [read, [names[dim]]],
        [names],
        kinds={"v": "sum"},
        linear=linear_groups(node, (0,)),
        localize=_index_select_locally,
    )


def _scatter_add_locally(call: LocalCall) -> Any:
    piece = split_piece(call, "v")
    if piece is None:
        return call.again()
    named = call_arguments(call)
    index, outside = local_index(call, named["index"], piece)
    return emit_with(call, index=index, src=call.emit(aten.masked_fill.Scalar, named["src"], outside, 0))


@rule(aten.scatter_add.default)
def scatter_add(node: fx.Node) -> Rule:
    """Additions at indices along one dim: that dim is parallel; onto zeros, the indices are a sum."""
    (base, index, src), rank = operand_shapes(node), len(shape_of(node))
    if not rank or not len(index) == len(src) == rank:
        return replicated_rule(node, "a scatter_add to a 0-dim tensor")
    named = arguments(node)
    dim, zero = wrap(named["dim"], rank), is_zero(named["self"])
    names = letters(rank)
    shared: list[str | None] = [n if base[i] == index[i] == src[i] else None for i, n in enumerate(names)]
    written, added = list(shared), list(shared)
    written[dim] = "v" if index == src and _numeric(node) else None
    added[dim] = "j" if zero and index[dim] == src[dim] and _numeric(node) else None
    groups = ((0, 2), (2,)) if zero else ((0, 2),)
    return make_rule(
        node,
        [written, added, added],
        [written],
        kinds={"j": "sum"},
        linear=linear_groups(node, *groups),
        localize=_scatter_add_locally,
    )


def _scatter_locally(call: LocalCall) -> Any:
    """Write what lies outside the piece to one more entry, which is then cut off; what nobody has goes behind it."""
    piece = split_piece(call, "v")
    if piece is None:
        return call.again()
    named, rank = call_arguments(call), len(call.result_shapes[0])
    dim = wrap(named["dim"], rank)
    first, last = _bounds(piece)
    moved = call.emit(aten.sub.Tensor, named["index"], piece.offset)
    moved = call.emit(aten.add.Tensor, moved, call.emit(aten.ge.Scalar, moved, piece.length))
    low = call.emit(aten.lt.Scalar, moved, first)
    outside = call.emit(aten.logical_or.default, low, call.emit(aten.ge.Scalar, moved, last))
    index = call.emit(aten.masked_fill.Scalar, moved, outside, piece.length)
    pad = [0] * (2 * (rank - dim))
    pad[-1] = 1
    longer = call.emit(aten.constant_pad_nd.default, named["self"], pad, 0)
    written = emit_with(call, self=longer, index=index)
    return call.emit(aten.slice.Tensor, written, dim, 0, piece.length)


@rule(aten.scatter.value, aten.scatter.src)
def scatter(node: fx.Node) -> Rule:
    """Writes at indices along one dim: that dim is parallel, the indices along it are not split."""
    shapes, rank = operand_shapes(node), len(shape_of(node))
    if not rank or any(len(shape) != rank for shape in shapes):
        return replicated_rule(node, "a scatter to a 0-dim tensor")
    dim, names = wrap(arguments(node)["dim"], rank), letters(rank)
    shared: list[str | None] = [
        name if len({shape[i] for shape in shapes}) == 1 else None for i, name in enumerate(names)
    ]
    written = list(shared)
    written[dim] = "v"
    rest = blocked(shared, dim)
    return make_rule(node, [written, *(rest for _ in shapes[1:])], [written], localize=_scatter_locally)


def _index_add_locally(call: LocalCall) -> Any:
    piece = split_piece(call, "v")
    if piece is None:
        return call.again()
    named = call_arguments(call)
    index, mask = _local_list(call, named, piece)
    return emit_with(call, index=index, source=call.emit(aten.masked_fill.Scalar, named["source"], mask, 0))


@rule(aten.index_add.default)
def index_add(node: fx.Node) -> Rule:
    """Additions of rows at a list of indices: the indexed dim is parallel; onto zeros, the list is a sum."""
    (_, index, source), rank = operand_shapes(node), len(shape_of(node))
    if not rank or len(index) != 1 or len(source) != rank:
        return replicated_rule(node, "an index_add to a 0-dim tensor")
    named = arguments(node)
    dim, names, zero = wrap(named["dim"], rank), letters(rank), is_zero(named["self"])
    written, added = list(names), list(names)
    written[dim], added[dim] = "v", "j" if zero else None
    groups = ((0, 2), (2,)) if zero else ((0, 2),)
    return make_rule(
        node,
        [written, [added[dim]], added],
        [written],
        kinds={"j": "sum"},
        linear=linear_groups(node, *groups),
        localize=_index_add_locally,
    )


@rule(aten.searchsorted.Tensor, aten.bucketize.Tensor)
def search(node: fx.Node) -> Rule:
    """A search in sorted boundaries of one dim: what is searched for is parallel, the boundaries are read whole."""
    named = arguments(node)
    boundaries = named["sorted_sequence"] if "sorted_sequence" in named else named["boundaries"]
    if len(shape_of(boundaries)) != 1 or named.get("sorter") is not None:
        return replicated_rule(node, "a search in boundaries of several dims")
    names = letters(len(result_shapes(node)[0]))
    sides: list[list[str | None]] = [[None], list(names)]
    return make_rule(node, sides if node.target is aten.searchsorted.Tensor else sides[::-1], [names])
