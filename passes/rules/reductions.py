"""Reductions, scans and sorts: a reduced dim leaves a partial value; a dim with an order is not split."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar.passes.rules.form import (
    arguments,
    blocked,
    letters,
    linear_groups,
    make_rule,
    operand_shapes,
    result_shapes,
    wrap,
)
from autopar.passes.rules.rule import LocalCall, Localize, Rule
from autopar.passes.rules.table import rule

aten = torch.ops.aten


def reduced_dims(dim: Any, rank: int) -> list[int]:
    """Return the dims that an argument names, counted from the front; all for None or an empty list."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(rank))
    return sorted({wrap(d, rank) for d in (dim if isinstance(dim, (list, tuple)) else [dim])}) if rank else []


def reduction_rule(
    node: fx.Node,
    dims: list[int],
    keepdim: bool,
    kind: str | None,
    *,
    linear: bool = False,
    localize: Localize | None = None,
) -> Rule:
    """Return the rule of a reduction of the first operand over ``dims``; with no ``kind`` they are not split."""
    rank = len(operand_shapes(node)[0])
    names = letters(rank)
    kept: list[str | None] = [None if i in dims else name for i, name in enumerate(names)]
    out = kept if keepdim else [name for i, name in enumerate(names) if i not in dims]
    return make_rule(
        node,
        [names if kind else kept],
        [out for _ in result_shapes(node)],
        kinds={f"d{i}": kind for i in dims} if kind else {},
        linear=linear_groups(node, (0,)) if linear else (),
        through=((kind, (0,)),) if kind in ("max", "min") else (),
        localize=localize,
    )


def _dims(node: fx.Node) -> tuple[list[int], bool]:
    named = arguments(node)
    return reduced_dims(named.get("dim"), len(operand_shapes(node)[0])), bool(named.get("keepdim", False))


@rule(aten.sum.default, aten.sum.dim_IntList, aten.nansum.default)
def sum_(node: fx.Node) -> Rule:
    """A sum: partial over a split of what it sums, and linear."""
    return reduction_rule(node, *_dims(node), "sum", linear="nansum" not in str(node.target))


@rule(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count_nonzero(node: fx.Node) -> Rule:
    """A count is a sum."""
    return reduction_rule(node, *_dims(node), "sum")


@rule(aten.mean.default, aten.mean.dim)
def mean(node: fx.Node) -> Rule:
    """A mean: the mean of a piece, weighed by the piece's share, is a partial sum."""
    dims, keepdim = _dims(node)

    def localize(call: LocalCall) -> Any:
        parts = [call.pieces[f"d{i}"] for i in dims if f"d{i}" in call.pieces]
        local = call.again()
        if all(piece.parts == 1 for piece in parts):
            return local
        share = math.prod(piece.length for piece in parts) / math.prod(piece.size for piece in parts)
        return call.emit(aten.mul.Tensor, local, share)

    return reduction_rule(node, dims, keepdim, "sum", linear=True, localize=localize)


@rule(aten.amax.default, aten.amin.default)
def extreme(node: fx.Node) -> Rule:
    """A maximum or minimum over dims."""
    return reduction_rule(node, *_dims(node), "max" if node.target is aten.amax.default else "min")


@rule(aten.max.default, aten.min.default)
def extreme_of_all(node: fx.Node) -> Rule:
    """A maximum or minimum of all elements."""
    return reduction_rule(node, *_dims(node), "max" if node.target is aten.max.default else "min")


@rule(aten.prod.default, aten.prod.dim_int)
def prod(node: fx.Node) -> Rule:
    """A product over a dim."""
    return reduction_rule(node, *_dims(node), "product")


@rule(
    aten.max.dim,
    aten.min.dim,
    aten.argmax.default,
    aten.argmin.default,
    aten.any.default,
    aten.any.dim,
    aten.any.dims,
    aten.all.default,
    aten.all.dim,
    aten.all.dims,
    aten.logsumexp.default,
    aten.var.correction,
    aten.std.correction,
    aten.var_mean.correction,
    aten.std_mean.correction,
    aten.linalg_vector_norm.default,
    aten.norm.ScalarOpt_dim,
    aten.median.dim,
    aten.nanmedian.dim,
    aten.mode.default,
    aten.kthvalue.default,
)
def whole_reduction(node: fx.Node) -> Rule:
    """A reduction that no collective completes: its dims are not split."""
    return reduction_rule(node, *_dims(node), None)


def _scan(node: fx.Node, *, linear: tuple[tuple[int, ...], ...] = ()) -> Rule:
    """Return the rule of an op of same-shaped tensors that works along one dim."""
    operands, results = operand_shapes(node), result_shapes(node)
    named = arguments(node)
    dim = named.get("dim")
    names = letters(len(results[0]))
    names = blocked(names, *reduced_dims(-1 if dim is None else dim, len(names)))
    return make_rule(node, [names for _ in operands], [names for _ in results], linear=linear_groups(node, *linear))


@rule(
    aten.cumprod.default,
    aten.cummax.default,
    aten.cummin.default,
    aten.logcumsumexp.default,
    aten._softmax.default,
    aten._log_softmax.default,
    aten.softmax.int,
    aten.log_softmax.int,
    aten._safe_softmax.default,
    aten.sort.default,
    aten.sort.stable,
    aten.argsort.default,
)
def along_dim(node: fx.Node) -> Rule:
    """An op along one dim: every other dim is parallel."""
    return _scan(node)


@rule(aten.cumsum.default, aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def linear_along_dim(node: fx.Node) -> Rule:
    """An op along one dim, linear in its first operand."""
    return _scan(node, linear=((0,),))


@rule(aten.flip.default, aten.roll.default)
def moved_along_dims(node: fx.Node) -> Rule:
    """A flip or a roll: the dims it moves are not split."""
    named, names = arguments(node), letters(len(operand_shapes(node)[0]))
    dims = named["dims"]
    if node.target is aten.flip.default and not dims:
        moved: list[int] = []
    else:
        moved = reduced_dims(dims, len(names))
    names = blocked(names, *moved) if moved else names
    return make_rule(node, [names], [names], linear=linear_groups(node, (0,)))


@rule(aten.topk.default)
def topk(node: fx.Node) -> Rule:
    """The largest elements along one dim, which is not split."""
    shape = operand_shapes(node)[0]
    names = blocked(letters(len(shape)), wrap(arguments(node)["dim"], len(shape)))
    return make_rule(node, [names], [names, names])
