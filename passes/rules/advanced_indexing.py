"""Indexing by tensors: dims that no tensor indexes are parallel, indexed dims answer for their own indices alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.passes.rules.form import (
    arguments,
    broadcast_dims,
    call_arguments,
    emit_with,
    is_zero,
    linear_groups,
    make_rule,
    shape_of,
)
from autopar.passes.rules.indexing import local_index, split_piece
from autopar.passes.rules.rule import LocalCall, Piece, Rule
from autopar.passes.rules.table import replicated_rule, rule

aten = torch.ops.aten

Dims = list[str | None]


@dataclass(frozen=True)
class _Read:
    """The dims of ``x[indices]``: of the tensor, of every index, of what is read and its index dims."""

    tensor: Dims
    indices: list[Dims]
    result: Dims
    indexed: tuple[int, ...]
    first: int
    num_index_dims: int


def _read(node: fx.Node, indices: Sequence[Any], shape: tuple[int, ...]) -> _Read | str:
    """Return the dims of a read, or why it is unusual."""
    used = [i for i, index in enumerate(indices) if index is not None]
    if any(indices[i].meta["val"].dtype in (torch.bool, torch.uint8) for i in used):
        return "indexing by a mask"
    if not used or len(indices) > len(shape):
        return "indexing by nothing"
    together = torch.broadcast_shapes(*(shape_of(indices[i]) for i in used))
    names: Dims = [f"i{k}" for k in range(len(together))]
    rest = [f"d{i}" for i in range(len(shape)) if i not in used]
    contiguous = used == list(range(used[0], used[0] + len(used)))
    first = used[0] if contiguous else 0
    return _Read(
        tensor=[f"v{i}" if i in used else f"d{i}" for i in range(len(shape))],
        indices=[broadcast_dims(shape_of(indices[i]), together, names) for i in used],
        result=[*rest[:first], *names, *rest[first:]],
        indexed=tuple(used),
        first=first,
        num_index_dims=len(together),
    )


def _move_indices(call: LocalCall, read: _Read, indices: Sequence[Any]) -> tuple[list[Any], Any]:
    """Emit local indices and the mask, in the shape of the indices together, of what another rank answers for."""
    moved, outside = list(indices), None
    for dim in read.indexed:
        piece: Piece | None = split_piece(call, f"v{dim}")
        if piece is None:
            continue
        moved[dim], other = local_index(call, moved[dim], piece, negative=True)
        outside = other if outside is None else call.emit(aten.logical_or.default, outside, other)
    return moved, outside


def _align(call: LocalCall, read: _Read, outside: Any, rank: int) -> Any:
    """Emit the mask with dims of size 1 for the dims of the result behind the index dims."""
    for _ in range(rank - read.first - read.num_index_dims):
        outside = call.emit(aten.unsqueeze.default, outside, -1)
    return outside


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(node: fx.Node) -> Rule:
    """A read at tensors of indices: indexed dims are sums."""
    named = arguments(node)
    read = _read(node, named["indices"], shape_of(named["self"]))
    if isinstance(read, str):
        return replicated_rule(node, read)
    if node.meta["val"].dtype is torch.bool:
        tensor: Dims = [None if i in read.indexed else name for i, name in enumerate(read.tensor)]
    else:
        tensor = read.tensor

    def localize(call: LocalCall) -> Any:
        indices, outside = _move_indices(call, read, call_arguments(call)["indices"])
        if outside is None:
            return call.again()
        rows = emit_with(call, indices=indices)
        mask = _align(call, read, outside, len(call.result_shapes[0]))
        return call.emit(aten.masked_fill.Scalar, rows, mask, 0)

    return make_rule(
        node,
        [tensor, *read.indices],
        [read.result],
        kinds={f"v{i}": "sum" for i in read.indexed},
        linear=linear_groups(node, (0,)),
        localize=localize,
    )


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(node: fx.Node) -> Rule:
    """A write at tensors of indices; when it adds, indexed dims are parallel, and onto zeros the indices are a sum."""
    named = arguments(node)
    shape = shape_of(named["self"])
    read = _read(node, named["indices"], shape)
    if isinstance(read, str):
        return replicated_rule(node, read)
    if named["accumulate"] and node.meta["val"].dtype is torch.bool:
        return replicated_rule(node, "additions of truth values")
    adds, zero = bool(named["accumulate"]), is_zero(named["self"])
    full = _read_shape(read, [shape_of(i) for i in named["indices"] if i is not None], shape)
    value_shape = shape_of(named["values"])
    if len(value_shape) > len(full):
        return replicated_rule(node, "more values than places")
    whole = adds and all(size > 1 or full[len(full) - len(value_shape) + i] == 1 for i, size in enumerate(value_shape))
    split_indices = adds and zero and whole and len(value_shape) == len(full)
    sums = {str(name): "sum" for name in read.result if str(name).startswith("i")}
    result: Dims = list(read.result) if split_indices else [None if str(n) in sums else n for n in read.result]
    indices: list[Dims] = read.indices if split_indices else [[None] * len(dims) for dims in read.indices]
    tensor: Dims = [None if i in read.indexed and not adds else name for i, name in enumerate(read.tensor)]

    def localize(call: LocalCall) -> Any:
        named = call_arguments(call)
        moved, outside = _move_indices(call, read, named["indices"])
        if outside is None:
            return call.again()
        mask = _align(call, read, outside, len(full))
        zero = call.emit(aten.zeros_like.default, named["values"])
        return emit_with(call, indices=moved, values=call.emit(aten.where.self, mask, zero, named["values"]))

    last = len(read.indices) + 1
    groups: tuple[tuple[int, ...], ...] = ((0, last), (last,)) if adds and zero else ((0, last),)
    return make_rule(
        node,
        [tensor, *indices, broadcast_dims(value_shape, full, result)],
        [tensor],
        kinds=sums,
        linear=linear_groups(node, *groups),
        localize=localize,
    )


def _read_shape(read: _Read, indices: list[tuple[int, ...]], shape: tuple[int, ...]) -> tuple[int, ...]:
    together = tuple(torch.broadcast_shapes(*indices))
    rest = [size for i, size in enumerate(shape) if i not in read.indexed]
    return (*rest[: read.first], *together, *rest[read.first :])
