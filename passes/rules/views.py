"""Views: reshapes, permutations and expansions move no number, so every partial sum passes through."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar.passes.rules.form import (
    arguments,
    broadcast_dims,
    emit_with,
    letters,
    linear_groups,
    make_rule,
    operand_shapes,
    shape_of,
    wrap,
)
from autopar.passes.rules.rule import LocalCall, Rule
from autopar.passes.rules.table import replicated_rule, rule

aten = torch.ops.aten


def common_factors(
    source: Sequence[int], target: Sequence[int]
) -> tuple[list[str | None], list[str | None], dict[str, int], list[str]]:
    """Factor a reshape: return the dims of both sides, the size of every factor, and which factors must be cut evenly.

    The dims of both sides are grouped into the shortest runs of equal products. A run of one dim a side is a factor as
    it stands. In a longer run only the outermost dims may be split, into pieces that start at the same element on both
    sides: by divisors of their greatest common divisor.

    >>> common_factors((6, 4, 5), (24, 5))
    (['v0', None, 'v1'], ['v0', 'v1'], {'v0': 6, 'v1': 5}, ['v0'])
    """
    left: list[str | None] = [None] * len(source)
    right: list[str | None] = [None] * len(target)
    sizes: dict[str, int] = {}
    even: list[str] = []
    for ins, outs in _runs(source, target):
        name = f"v{len(sizes)}"
        size = math.gcd(source[ins[0]], target[outs[0]])
        if size == 1:
            continue
        left[ins[0]] = right[outs[0]] = name
        sizes[name] = size
        if len(ins) > 1 or len(outs) > 1:
            even.append(name)
    return left, right, sizes, even


def _runs(source: Sequence[int], target: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Group the dims of size > 1 of both sides into the shortest runs of equal products."""
    ins = [i for i, n in enumerate(source) if n != 1]
    outs = [i for i, n in enumerate(target) if n != 1]
    runs: list[tuple[list[int], list[int]]] = []
    while ins and outs:
        a, b = [ins.pop(0)], [outs.pop(0)]
        left, right = source[a[0]], target[b[0]]
        while left != right:
            if left < right:
                if not ins:
                    return runs
                a.append(ins.pop(0))
                left *= source[a[-1]]
            else:
                if not outs:
                    return runs
                b.append(outs.pop(0))
                right *= target[b[-1]]
        runs.append((a, b))
    return runs


def _reshape_locally(call: LocalCall) -> Any:
    return call.emit(aten.reshape.default, call.args[0], list(call.result_shapes[0]))


@rule(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten._reshape_copy.default,
    aten.view_copy.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
)
def view(node: fx.Node) -> Rule:
    """A reshape, whatever its name: the outermost dim of every run is a factor."""
    source, target = operand_shapes(node)[0], shape_of(node)
    if 0 in source:
        return replicated_rule(node, "an empty tensor")
    left, right, sizes, even = common_factors(source, target)
    return make_rule(
        node,
        [left],
        [right],
        sizes=sizes,
        even=even,
        linear=linear_groups(node, (0,)),
        through=(("max", (0,)), ("min", (0,))) if _may_be_extreme(node.args[0]) else (),
        localize=_reshape_locally,
    )


def _may_be_extreme(value: Any) -> bool:
    """Tell whether a partial maximum or minimum may come out of the op that computes an argument."""
    return isinstance(value, fx.Node) and value.target in (aten.amax.default, aten.amin.default)


@rule(aten.view.dtype)
def view_dtype(node: fx.Node) -> Rule:
    """Bits read as another dtype: all dims but the last, whose size changes."""
    names = letters(len(shape_of(node)))
    if names and operand_shapes(node)[0] != shape_of(node):
        names[-1] = None
    return make_rule(node, [names], [names])


def _expand_locally(call: LocalCall) -> Any:
    return call.emit(aten.expand.default, call.args[0], list(call.result_shapes[0]))


@rule(aten.expand.default, aten.expand_copy.default, aten.expand_as.default, aten.broadcast_to.default)
def expand(node: fx.Node) -> Rule:
    """An expansion: every dim of the result is a factor, the operand has it where it is not repeated."""
    full, names = shape_of(node), letters(len(shape_of(node)))
    operands = [broadcast_dims(shape, full, names) for shape in operand_shapes(node)]
    return make_rule(
        node,
        operands,
        [names],
        linear=linear_groups(node, (0,)) if len(operands) == 1 else (),
        localize=_expand_locally,
    )


@rule(
    aten.permute.default,
    aten.permute_copy.default,
    aten.transpose.int,
    aten.t.default,
    aten.movedim.int,
    aten.numpy_T.default,
)
def permute(node: fx.Node) -> Rule:
    """A permutation of dims."""
    named, rank = arguments(node), len(shape_of(node))
    order = list(range(rank))
    name = str(node.target._schema.name)  # type: ignore[union-attr]
    if name.startswith("aten::permute"):
        order = [wrap(dim, rank) for dim in named["dims"]]
    elif name == "aten::transpose":
        a, b = wrap(named["dim0"], rank), wrap(named["dim1"], rank)
        if rank:
            order[a], order[b] = order[b], order[a]
    elif name == "aten::movedim":
        order.insert(wrap(named["destination"], rank), order.pop(wrap(named["source"], rank)))
    else:
        order.reverse()
    names = letters(rank)
    return make_rule(node, [names], [[names[i] for i in order]], linear=linear_groups(node, (0,)))


@rule(aten.repeat.default)
def repeat(node: fx.Node) -> Rule:
    """Dims that are repeated once are factors; those that are repeated more are not split."""
    source, full = operand_shapes(node)[0], shape_of(node)
    lead = len(full) - len(source)
    names: list[str | None] = [
        f"d{i}" if i >= lead and source[i - lead] == size else None for i, size in enumerate(full)
    ]
    return make_rule(node, [names[lead:]], [names], linear=linear_groups(node, (0,)))


@rule(aten.repeat_interleave.self_int)
def repeat_interleave(node: fx.Node) -> Rule:
    """A dim whose elements are each repeated is cut evenly, so that pieces start at the same element."""
    named, source = arguments(node), operand_shapes(node)[0]
    if named["dim"] is None or not source or not isinstance(named["repeats"], int):
        return replicated_rule(node, "repeat_interleave of a flattened tensor")
    dim, names = wrap(named["dim"], len(source)), letters(len(source))
    size = f"d{dim}"

    def localize(call: LocalCall) -> Any:
        return emit_with(call, output_size=call.result_shapes[0][dim])

    grows = named["repeats"] > 1
    return make_rule(
        node,
        [names],
        [names if source[dim] > 1 else [None if i == dim else n for i, n in enumerate(names)]],
        sizes={size: source[dim]} if grows and source[dim] > 1 else {},
        even=[size] if grows else [],
        linear=linear_groups(node, (0,)),
        localize=localize,
    )
