"""Build rules: dims and factors from shapes, arguments by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.passes.program import result_values, tensor_operands
from autopar.passes.rules.rule import PARALLEL, Dims, Factor, LocalCall, Localize, Rule
from autopar.passes.rules.table import replicated_rule

ZERO_FACTORIES = frozenset(
    {
        torch.ops.aten.zeros.default,
        torch.ops.aten.zeros_like.default,
        torch.ops.aten.new_zeros.default,
    }
)
FILLED: dict[Any, str] = {
    torch.ops.aten.full.default: "fill_value",
    torch.ops.aten.full_like.default: "fill_value",
    torch.ops.aten.new_full.default: "fill_value",
    torch.ops.aten.scalar_tensor.default: "s",
    torch.ops.aten.fill.Scalar: "value",
    torch.ops.aten.fill.Tensor: "value",
}
"""Ops that fill a tensor with one value, and the name of the argument that holds it."""


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the global shape of a tensor node."""
    return tuple(node.meta["val"].shape)


def operand_shapes(node: fx.Node) -> list[tuple[int, ...]]:
    """Return the shape of every tensor operand, in ``tensor_operands`` order."""
    return [shape_of(operand) for operand in tensor_operands(node)]


def result_shapes(node: fx.Node) -> list[tuple[int, ...]]:
    """Return the shape of every tensor result, in ``result_values`` order."""
    return [tuple(value.shape) for _, value in result_values(node)]


def make_rule(
    node: fx.Node,
    operands: Sequence[Sequence[str | None]],
    results: Sequence[Sequence[str | None]],
    *,
    kinds: Mapping[str, str] | None = None,
    sizes: Mapping[str, int] | None = None,
    even: Collection[str] = (),
    roles: Mapping[str, str] | None = None,
    growth: Mapping[str, float] | None = None,
    linear: Sequence[tuple[int, ...]] = (),
    through: Sequence[tuple[str, tuple[int, ...]]] = (),
    same: Sequence[tuple[str, int]] = (),
    localize: Localize | None = None,
    flops: float = 0.0,
    random: bool = False,
    reason: str = "",
) -> Rule:
    """Build the rule of ``node`` from the dims of its operands and results.

    A factor's size is the size of the dims that it indexes, unless ``sizes`` gives it (a dim that has inner factors).
    Dims of size 1 can't be split and become None. Factors are parallel unless ``kinds`` says otherwise.
    When shapes and dims contradict each other the op is replicated, with the reason.
    """
    kinds, roles, growth, found = kinds or {}, roles or {}, growth or {}, dict(sizes or {})
    given = frozenset(found)
    order: list[str] = []
    sides = []
    for all_dims, shapes in ((operands, operand_shapes(node)), (results, result_shapes(node))):
        if len(all_dims) != len(shapes) or any(len(d) != len(s) for d, s in zip(all_dims, shapes)):
            return replicated_rule(node, f"unusual arguments of {node.target}")
        side: list[Dims] = []
        for dims, shape in zip(all_dims, shapes):
            kept = tuple(name if size > 1 else None for name, size in zip(dims, shape))
            for name, size in zip(kept, shape):
                if name is None:
                    continue
                if name not in order:
                    order.append(name)
                if found.setdefault(name, size) != size and name not in given:
                    return replicated_rule(node, f"shapes of {node.target} that do not agree on {name}")
            side.append(kept)
        sides.append(tuple(side))
    factors = tuple(
        Factor(name, found[name], kinds.get(name, PARALLEL), name in even, roles.get(name, ""), growth.get(name, 0.0))
        for name in order
    )
    return Rule(
        factors,
        sides[0],
        sides[1],
        linear=tuple(linear),
        through=tuple(through),
        same=tuple(pair for pair in same if pair[0] in order),
        localize=localize,
        flops=flops,
        random=random,
        reason=reason,
    )


def letters(rank: int, prefix: str = "d") -> list[str | None]:
    """Return one factor name a dim: ``d0, d1, ...``."""
    return [f"{prefix}{i}" for i in range(rank)]


def blocked(dims: Sequence[str | None], *which: int) -> list[str | None]:
    """Return ``dims`` with the dims ``which`` (negative ones count from the end) not to be split."""
    out = list(dims)
    for dim in which:
        if out:
            out[dim % len(out)] = None
    return out


def wrap(dim: int, rank: int) -> int:
    """Return a dim counted from the front; 0 for a 0-dim tensor."""
    return dim % rank if rank else 0


def broadcast_dims(shape: Sequence[int], target: Sequence[int], names: Sequence[str | None]) -> list[str | None]:
    """Return the dims of an operand that broadcasts to ``target`` of dims ``names``: None where it has size 1."""
    lead = len(target) - len(shape)
    return [names[lead + i] if size == target[lead + i] else None for i, size in enumerate(shape)]


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an op by their schema names, defaults included."""
    out: dict[str, Any] = {}
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if i < len(node.args):
            out[argument.name] = node.args[i]
        elif argument.name in node.kwargs:
            out[argument.name] = node.kwargs[argument.name]
        elif argument.has_default_value():
            out[argument.name] = argument.default_value
        else:
            out[argument.name] = None
    return out


def call_arguments(call: LocalCall) -> dict[str, Any]:
    """Return the arguments of a local call by their schema names, defaults included."""
    out: dict[str, Any] = {}
    for i, argument in enumerate(call.target._schema.arguments):
        if i < len(call.args):
            out[argument.name] = call.args[i]
        else:
            default = argument.default_value if argument.has_default_value() else None
            out[argument.name] = call.kwargs.get(argument.name, default)
    return out


def emit_with(call: LocalCall, **changes: Any) -> Any:
    """Emit the op of ``call`` with some arguments, given by schema name, replaced."""
    args, kwargs = list(call.args), dict(call.kwargs)
    for i, argument in enumerate(call.target._schema.arguments):
        if argument.name in changes:
            if i < len(args):
                args[i] = changes[argument.name]
            else:
                kwargs[argument.name] = changes[argument.name]
    return call.emit(call.target, *args, **kwargs)


def filled_with(value: Any) -> Any:
    """Return the number that fills all of a tensor argument, or the number itself; None when it isn't known."""
    if not isinstance(value, fx.Node):
        return value if isinstance(value, (int, float, bool)) else None
    if value.target in ZERO_FACTORIES:
        return 0
    name = FILLED.get(value.target)
    if name is not None:
        return filled_with(arguments(value)[name])
    if value.target in PASSES_FILL and value.args:
        return filled_with(value.args[0])
    return None


def is_zero(value: Any) -> bool:
    """Tell whether an argument is known to be zero everywhere."""
    number = filled_with(value)
    return number is not None and not isinstance(number, bool) and number == 0


PASSES_FILL = frozenset(
    {
        torch.ops.aten.expand.default,
        torch.ops.aten.view.default,
        torch.ops.aten.clone.default,
        torch.ops.aten.permute.default,
        torch.ops.aten.unsqueeze.default,
    }
)
"""Ops that keep a constant tensor constant."""


def exact(source: torch.dtype, target: torch.dtype) -> bool:
    """Tell whether summing after a conversion is as good as before it: no bool, same kind of number, no narrowing."""
    if source is torch.bool or target is torch.bool:
        return False
    if source.is_floating_point != target.is_floating_point or source.is_complex != target.is_complex:
        return False
    return torch.promote_types(source, target) is target


def linear_groups(node: fx.Node, *groups: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Keep the groups of operands whose dtypes a partial sum may pass through."""
    operands = [operand.meta["val"].dtype for operand in tensor_operands(node)]
    results = [value.dtype for _, value in result_values(node)]
    return tuple(
        group
        for group in groups
        if all(i < len(operands) and exact(operands[i], result) for i in group for result in results)
    )
