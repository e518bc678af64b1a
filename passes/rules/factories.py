"""Factories: a rank makes its own piece of a constant; random numbers are drawn whole, so that all ranks agree."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.passes import ops as _ops  # noqa: F401  (defines torch.ops.autopar)
from autopar.passes.rules.form import arguments, call_arguments, emit_with, letters, make_rule, operand_shapes, shape_of
from autopar.passes.rules.rule import LocalCall, Piece, Rule
from autopar.passes.rules.table import replicated_rule, rule

aten = torch.ops.aten
prims = torch.ops.prims

UNSPECIFIED = frozenset(
    {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default}
)
"""Ops whose results hold whatever lay in memory."""


@rule(aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format)
def filled(node: fx.Node) -> Rule:
    """A constant tensor: every dim may be cut, the size argument is the piece's."""

    def localize(call: LocalCall) -> Any:
        return emit_with(call, size=list(call.result_shapes[0]))

    return make_rule(node, [], [letters(len(shape_of(node)))], localize=localize)


@rule(
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
def filled_like_another(node: fx.Node) -> Rule:
    """A constant tensor of another's dtype and device; the other may lie anyhow, since nobody reads its numbers."""
    if node.target is aten.new_empty_strided.default:
        return replicated_rule(node, "strides in an argument")
    shape, like = shape_of(node), operand_shapes(node)[0]

    def localize(call: LocalCall) -> Any:
        return emit_with(call, size=list(call.result_shapes[0]))

    if shape == like:
        return make_rule(node, [letters(len(like))], [letters(len(shape))], localize=localize)
    others = letters(len(like), "x")
    return make_rule(
        node,
        [others],
        [letters(len(shape))],
        same=[(str(name), 0) for name in others],
        localize=localize,
    )


@rule(aten.scalar_tensor.default)
def scalar(node: fx.Node) -> Rule:
    """A number as a 0-dim tensor: nothing to split."""
    return make_rule(node, [], [[]])


def _arange_piece(start: Any, step: Any, piece: Piece | None) -> tuple[Any, Any] | None:
    """Return the ``start`` and ``end`` that give one piece exactly; None for the whole."""
    if piece is None or piece.parts == 1:
        return None
    first = start + piece.offset * step
    if isinstance(start, int) and isinstance(step, int):
        return first, first + piece.length * step
    return first, first + (piece.length - 0.5) * step


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(node: fx.Node) -> Rule:
    """A range: a piece starts at its offset. Ranges of broken numbers are not split, because rounding would differ."""
    named = arguments(node)
    start, step = named.get("start", 0), named.get("step", 1)
    if not all(isinstance(number, int) for number in (start, named["end"], step)):
        return replicated_rule(node, "a range of floating point numbers")

    def localize(call: LocalCall) -> Any:
        ends = _arange_piece(start, step, call.pieces.get("d0"))
        if ends is None:
            return call.again()
        options = {k: v for k, v in call_arguments(call).items() if k in ("dtype", "layout", "device", "pin_memory")}
        return call.emit(aten.arange.start_step, *ends, step, **options)

    return make_rule(node, [], [["d0"]], localize=localize)


@rule(prims.iota.default)
def iota(node: fx.Node) -> Rule:
    """A range of a given length."""
    named = arguments(node)

    def localize(call: LocalCall) -> Any:
        piece = call.pieces.get("d0")
        if piece is None or piece.parts == 1:
            return call.again()
        return call.emit(
            call.target,
            piece.length,
            **{**call.kwargs, "start": named["start"] + piece.offset * named["step"]},
        )

    return make_rule(node, [], [["d0"]], localize=localize)


@rule(aten.eye.default, aten.eye.m, aten.linspace.default, aten.logspace.default, aten.tril_indices.default)
def made_whole(node: fx.Node) -> Rule:
    """A constant that every rank makes whole."""
    return replicated_rule(node, "a small constant that every rank makes")


@rule(
    aten.rand.default,
    aten.randn.default,
    aten.randint.default,
    aten.randint.low,
    aten.randperm.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.bernoulli.default,
    aten.bernoulli.p,
    aten.multinomial.default,
    aten.normal.Tensor_float,
    aten.normal_functional.default,
    aten.native_dropout.default,
)
def drawn_whole(node: fx.Node) -> Rule:
    """Random numbers that every rank draws whole from the same generator state."""
    whole = replicated_rule(node, "random numbers are drawn whole on every rank")
    return Rule((), whole.operands, whole.results, random=True, reason=whole.reason)


@rule(torch.ops.autopar.bernoulli.default)
def bernoulli(node: fx.Node) -> Rule:
    """A dropout mask: a rank draws the whole one and keeps its piece, at its own offset."""
    named = arguments(node)
    names = letters(len(shape_of(node)))
    base = list(named["offset"])

    def localize(call: LocalCall) -> Any:
        offset = [
            start + (call.pieces[name].offset if name in call.pieces else 0)
            for start, name in zip(base, map(str, names))
        ]
        return emit_with(call, offset=offset, length=list(call.result_shapes[0]))

    return make_rule(node, [], [names], localize=localize, random=True)
