"""Elementwise ops: every dim of the result is a parallel factor, which an operand has where its size is full."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from autopar.passes.program import tensor_operands
from autopar.passes.rules.form import (
    arguments,
    broadcast_dims,
    is_zero,
    letters,
    linear_groups,
    make_rule,
    operand_shapes,
    result_shapes,
)
from autopar.passes.rules.rule import Rule
from autopar.passes.rules.table import replicated_rule, rule

aten = torch.ops.aten

Groups = tuple[tuple[int, ...], ...]

_PLAIN = """
abs acos acosh angle asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip conj_physical copysign cos cosh deg2rad
digamma elu eq erf erfc erfinv exp exp2 expm1 floor floor_divide fmax fmin fmod frac gcd ge gelu gt hardshrink
hardsigmoid hardswish hardtanh heaviside hypot i0 igamma igammac isfinite isinf isnan isneginf isposinf lcm
ldexp le leaky_relu lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or
logical_xor logit lt maximum minimum mish nan_to_num ne nextafter polygamma pow rad2deg reciprocal relu relu6
remainder round rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink special_entr
special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_ndtri special_xlog1py sqrt square tan
tanh threshold trunc xlogy __and__ __or__ __xor__ __lshift__ __rshift__ zeros_like ones_like full_like
empty_like fill
"""
PLAIN = _PLAIN.split()
"""Ops through which no partial sum passes."""

_FIRST = """
neg positive clone alias detach lift_fresh_copy gelu_backward silu_backward tanh_backward sigmoid_backward
threshold_backward hardtanh_backward hardswish_backward hardsigmoid_backward leaky_relu_backward elu_backward
logit_backward softplus_backward mish_backward hardshrink_backward softshrink_backward native_dropout_backward
"""
FIRST = _FIRST.split()
"""Ops that are linear in their first operand alone: a gradient, or what is only moved."""


def overloads(name: str) -> Iterator[Any]:
    """Yield the overloads of an ATen op that neither write to an argument nor are meant for Python scalars alone."""
    packet = getattr(aten, name)
    for overload in sorted(packet.overloads()):
        op = getattr(packet, overload)
        texts = [str(argument.type) for argument in op._schema.arguments]
        if not op._schema.is_mutable and "Tensor" in texts and overload not in ("names", "dimname"):
            yield op


def _targets(*names: str) -> list[Any]:
    return [op for name in names for op in overloads(name)]


def elementwise_rule(node: fx.Node, groups: Groups = ()) -> Rule:
    """Return the rule of an elementwise op, through whose operand ``groups`` partial sums pass."""
    shapes = result_shapes(node)
    if not shapes or len(set(shapes)) > 1:
        return replicated_rule(node, f"{node.target} has results of several shapes")
    full, names = shapes[0], letters(len(shapes[0]))
    operands = operand_shapes(node)
    if any(len(shape) > len(full) for shape in operands):
        return replicated_rule(node, f"unusual arguments of {node.target}")
    return make_rule(
        node,
        [broadcast_dims(shape, full, names) for shape in operands],
        [list(names) for _ in shapes],
        linear=linear_groups(node, *groups),
    )


def _enter(names: list[str], text: str, groups: Callable[[fx.Node], Groups]) -> None:
    def elementwise(node: fx.Node) -> Rule:
        return elementwise_rule(node, groups(node))

    elementwise.__doc__ = f"Every dim of the result is parallel; {text}."
    rule(*_targets(*names))(elementwise)


def _tensor(node: fx.Node, name: str) -> bool:
    return isinstance(arguments(node).get(name), fx.Node)


def _sum(node: fx.Node) -> Groups:
    """A sum of two tensors takes partial sums from both at once; beside a number it takes none."""
    if len(tensor_operands(node)) == 2:
        return ((0, 1),)
    return ((0,),) if is_zero(arguments(node).get("other")) else ()


def _product(node: fx.Node) -> Groups:
    return tuple((i,) for i in range(len(tensor_operands(node))))


def _quotient(node: fx.Node) -> Groups:
    """Division is linear in the dividend, unless it rounds."""
    if arguments(node).get("rounding_mode") is not None or not _tensor(node, "self"):
        return ()
    return ((0,),)


@rule(aten.where.self, aten.where.Scalar, aten.where.ScalarOther, aten.where.ScalarSelf)
def where(node: fx.Node) -> Rule:
    """A selection is linear in both branches, or in one when the other is zero."""
    return elementwise_rule(node, _where(node))


def _where(node: fx.Node) -> Groups:
    named = arguments(node)
    on, off = named["self"], named["other"]
    if len(tensor_operands(node)) == 3:
        return ((1, 2),) + (((1,),) if is_zero(off) else ()) + (((2,),) if is_zero(on) else ())
    if len(tensor_operands(node)) == 2 and is_zero(off if isinstance(on, fx.Node) else on):
        return ((1,),)
    return ()


def _masked_fill(node: fx.Node) -> Groups:
    if len(tensor_operands(node)) == 3:
        return ((0, 2),) + (((0,),) if is_zero(arguments(node)["value"]) else ())
    return ((0,),) if is_zero(arguments(node)["value"]) else ()


_enter(PLAIN, "no partial value passes", lambda node: ())
_enter(FIRST, "linear in the first operand", lambda node: ((0,),))
_enter(["add", "sub", "subtract"], "partial sums pass from both operands at once", _sum)
_enter(["mul", "multiply"], "linear in each operand", _product)
_enter(["div", "divide", "true_divide"], "linear in the dividend", _quotient)
_enter(["masked_fill"], "linear when it fills with zero", _masked_fill)
_enter(["addcmul"], "linear in the addend with either factor", lambda node: ((0, 1), (0, 2)))
_enter(["addcdiv"], "linear in the addend with the dividend", lambda node: ((0, 1),))
_enter(["lerp"], "linear in both ends", lambda node: ((0, 1),))


@rule(
    aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
)
def convert(node: fx.Node) -> Rule:
    """A conversion lets a partial sum pass when it widens: the sum of rounded pieces is not the rounded sum."""
    return elementwise_rule(node, ((0,),))
