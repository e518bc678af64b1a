"""Factories: a rank makes its own piece of a constant; random numbers are drawn whole, so that all ranks agree."""

from __future__ import annotations

from dataclasses import replace
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
    """A range: a piece starts at its offset; one of broken numbers is made whole and cut, as rounding would differ."""
    named = arguments(node)
    start, step = named.get("start", 0), named.get("step", 1)
    if not all(isinstance(number, int) for number in (start, named["end"], step)):
        return make_rule(node, [], [["d0"]], localize=lambda call: _kept(call, ["d0"], call.again()))

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


@rule(
    aten.eye.default,
    aten.eye.m,
    aten.linspace.default,
    aten.logspace.default,
    aten.tril_indices.default,
    aten.triu_indices.default,
    aten.hann_window.default,
    aten.hamming_window.default,
)
def made_whole(node: fx.Node) -> Rule:
    """A small constant: every rank makes the whole and keeps its piece."""
    names = letters(len(shape_of(node)))
    return make_rule(node, [], [names], localize=lambda call: _kept(call, names, call.again()))


def _kept(call: LocalCall, names: list[str | None], whole: Any) -> Any:
    """Emit the cuts that leave this rank's piece of a whole tensor of dims ``names``."""
    for dim, name in enumerate(names):
        piece = call.pieces.get(str(name))
        if piece is not None and piece.parts > 1:
            whole = call.emit(aten.slice.Tensor, whole, dim, piece.offset, piece.offset + piece.length)
    return whole


@rule(
    aten.rand.default,
    aten.randn.default,
    aten.randint.default,
    aten.randint.low,
    aten.randperm.default,
    aten.bernoulli.default,
    aten.multinomial.default,
    aten.normal.Tensor_float,
)
def drawn_whole(node: fx.Node) -> Rule:
    """Random numbers: every rank draws all of them from the same generator state and keeps its piece."""
    names = letters(len(shape_of(node)))
    operands = [[None] * len(shape) for shape in operand_shapes(node)]
    return make_rule(node, operands, [names], localize=lambda call: _kept(call, names, call.again()), random=True)


@rule(
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.bernoulli.p,
    aten.normal_functional.default,
    aten.uniform.default,
    aten.exponential.default,
)
def drawn_like_another(node: fx.Node) -> Rule:
    """The same of another's shape and dtype, whose numbers nobody reads: it may lie anyhow."""
    shape = list(shape_of(node))
    if not node.meta["val"].is_contiguous():
        return replace(replicated_rule(node, "random numbers in another order than that of the dims"), random=True)
    names = letters(len(shape))

    def localize(call: LocalCall) -> Any:
        if list(call.operand_shapes[0]) != shape or list(call.result_shapes[0]) != shape:
            like = call.emit(aten.new_empty.default, call.args[0], shape)
            return _kept(call, names, call.emit(call.target, like, *call.args[1:], **call.kwargs))
        return call.again()

    return make_rule(node, [names], [names], localize=localize, random=True)


@rule(aten.native_dropout.default)
def dropout_drawn_whole(node: fx.Node) -> Rule:
    """A dropout that no one wrote as a mask: drawn whole on every rank."""
    return replace(replicated_rule(node, "random numbers are drawn whole on every rank"), random=True)


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
