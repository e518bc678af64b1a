"""Slices, joins and pads: the dim that is cut or joined is not split, the others are parallel."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.passes.rules.form import (
    arguments,
    blocked,
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
from autopar.passes.rules.rule import LocalCall, Rule
from autopar.passes.rules.table import replicated_rule, rule

aten = torch.ops.aten


@rule(aten.slice.Tensor, aten.slice_copy.Tensor, aten.narrow.default, aten.narrow_copy.default)
def slice_(node: fx.Node) -> Rule:
    """A slice; a dim that is kept whole is parallel, and then the op only passes it on."""
    dim, rank = wrap(arguments(node)["dim"], len(shape_of(node))), len(shape_of(node))
    if shape_of(node) == operand_shapes(node)[0]:
        names = letters(rank)
        return make_rule(node, [names], [names], linear=linear_groups(node, (0,)), localize=_pass_on)
    names = blocked(letters(rank), dim)
    return make_rule(node, [names], [names], linear=linear_groups(node, (0,)))


def _pass_on(call: LocalCall) -> Any:
    return call.emit(aten.reshape.default, call.args[0], list(call.result_shapes[0]))


@rule(aten.select.int, aten.select_copy.int)
def select(node: fx.Node) -> Rule:
    """One index of a dim: the other dims are parallel."""
    names = letters(len(operand_shapes(node)[0]))
    dim = wrap(arguments(node)["dim"], len(names))
    rest = names[:dim] + names[dim + 1 :]
    return make_rule(node, [blocked(names, dim)], [rest], linear=linear_groups(node, (0,)))


@rule(
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.split_with_sizes_copy.default,
    aten.split_copy.Tensor,
    aten.chunk.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_chunk.default,
    aten.tensor_split.sections,
)
def split(node: fx.Node) -> Rule:
    """A cut along one dim into several results."""
    names = letters(len(operand_shapes(node)[0]))
    names = blocked(names, wrap(arguments(node)["dim"], len(names)))
    return make_rule(node, [names], [names for _ in result_shapes(node)], linear=linear_groups(node, (0,)))


@rule(aten.unbind.int)
def unbind(node: fx.Node) -> Rule:
    """Every index of a dim as a result of its own."""
    names = letters(len(operand_shapes(node)[0]))
    dim = wrap(arguments(node)["dim"], len(names))
    rest = names[:dim] + names[dim + 1 :]
    return make_rule(node, [blocked(names, dim)], [rest for _ in result_shapes(node)], linear=linear_groups(node, (0,)))


@rule(aten.cat.default)
def cat(node: fx.Node) -> Rule:
    """A concatenation: the joined dim is not split; partial sums pass when all operands are partial."""
    shapes = operand_shapes(node)
    if any(len(shape) != len(shape_of(node)) for shape in shapes):
        return replicated_rule(node, "a concatenation with an empty tensor of one dim")
    names = blocked(letters(len(shape_of(node))), wrap(arguments(node)["dim"], len(shape_of(node))))
    group = tuple(range(len(shapes)))
    return make_rule(node, [names for _ in shapes], [names], linear=linear_groups(node, group))


@rule(aten.stack.default)
def stack(node: fx.Node) -> Rule:
    """A concatenation along a new dim."""
    shapes, rank = operand_shapes(node), len(shape_of(node))
    dim, names = wrap(arguments(node)["dim"], rank), letters(rank - 1)
    out = [*names[:dim], None, *names[dim:]]
    return make_rule(node, [names for _ in shapes], [out], linear=linear_groups(node, tuple(range(len(shapes)))))


def _with_local_sizes(call: LocalCall) -> Any:
    return emit_with(call, input_sizes=list(call.result_shapes[0]))


@rule(aten.slice_backward.default)
def slice_backward(node: fx.Node) -> Rule:
    """The gradient of a slice: zeros but for the slice."""
    names = letters(len(shape_of(node)))
    if operand_shapes(node)[0] != shape_of(node):
        names = blocked(names, wrap(arguments(node)["dim"], len(names)))
        return make_rule(node, [names], [names], linear=linear_groups(node, (0,)), localize=_with_local_sizes)
    return make_rule(node, [names], [names], linear=linear_groups(node, (0,)), localize=_pass_on)


@rule(aten.select_backward.default)
def select_backward(node: fx.Node) -> Rule:
    """The gradient of a selection: zeros but for one index of a dim."""
    names = letters(len(shape_of(node)))
    dim = wrap(arguments(node)["dim"], len(names))
    rest = names[:dim] + names[dim + 1 :]
    return make_rule(node, [rest], [blocked(names, dim)], linear=linear_groups(node, (0,)), localize=_with_local_sizes)


@rule(aten.slice_scatter.default)
def slice_scatter(node: fx.Node) -> Rule:
    """A tensor with a slice of one dim replaced."""
    named = arguments(node)
    names = letters(len(shape_of(node)))
    names = blocked(names, wrap(named["dim"], len(names)))
    groups = ((0, 1), (1,)) if is_zero(named["self"]) else ((0, 1),)
    return make_rule(node, [names, names], [names], linear=linear_groups(node, *groups))


@rule(aten.select_scatter.default)
def select_scatter(node: fx.Node) -> Rule:
    """A tensor with one index of one dim replaced."""
    named = arguments(node)
    names = letters(len(shape_of(node)))
    dim = wrap(named["dim"], len(names))
    rest = names[:dim] + names[dim + 1 :]
    groups = ((0, 1), (1,)) if is_zero(named["self"]) else ((0, 1),)
    names = blocked(names, dim)
    return make_rule(node, [names, rest], [names], linear=linear_groups(node, *groups))


@rule(aten.constant_pad_nd.default)
def constant_pad_nd(node: fx.Node) -> Rule:
    """A pad: padded dims are not split; linear when the padding is zero."""
    named = arguments(node)
    rank, pad = len(shape_of(node)), list(named["pad"])
    padded = [rank - 1 - i for i in range(len(pad) // 2) if pad[2 * i] or pad[2 * i + 1]]
    names = blocked(letters(rank), *padded)
    groups = ((0,),) if is_zero(named["value"]) else ()
    return make_rule(node, [names], [names], linear=linear_groups(node, *groups))


@rule(aten.unfold.default, aten.unfold_copy.default)
def unfold(node: fx.Node) -> Rule:
    """Windows along one dim, which is not split."""
    names = letters(len(operand_shapes(node)[0]))
    if not names:
        return replicated_rule(node, "windows of a 0-dim tensor")
    names = blocked(names, wrap(arguments(node)["dimension"], len(names)))
    return make_rule(node, [names], [[*names, None]], linear=linear_groups(node, (0,)))


@rule(aten.unfold_backward.default)
def unfold_backward(node: fx.Node) -> Rule:
    """The gradient of windows along one dim."""
    names = letters(len(shape_of(node)))
    if not names:
        return replicated_rule(node, "windows of a 0-dim tensor")
    names = blocked(names, wrap(arguments(node)["dim"], len(names)))
    return make_rule(node, [[*names, None]], [names], linear=linear_groups(node, (0,)), localize=_with_local_sizes)


@rule(aten.tril.default, aten.triu.default)
def triangle(node: fx.Node) -> Rule:
    """A triangle: a piece of the rows or columns moves the diagonal."""
    names = letters(len(shape_of(node)))
    row, column = f"d{len(names) - 2}", f"d{len(names) - 1}"

    def localize(call: LocalCall) -> Any:
        offset = {name: piece.offset for name, piece in call.pieces.items()}
        diagonal = int(arguments(node)["diagonal"]) + offset.get(row, 0) - offset.get(column, 0)
        return emit_with(call, diagonal=diagonal)

    return make_rule(node, [names], [names], linear=linear_groups(node, (0,)), localize=localize)
