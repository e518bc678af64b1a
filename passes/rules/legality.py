"""Tell whether an op may take a choice on every axis of a mesh at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

from autopar.mesh import Mesh
from autopar.passes.redistribution import layout_is_legal
from autopar.passes.rules.rule import Choice, Rule
from autopar.placement import REPLICATE, Layout, code_name, is_partial, layout_name, pieces_nonempty

Shapes = Sequence[Sequence[int]]


def operand_layouts(choices: Sequence[Choice]) -> tuple[Layout, ...]:
    """Return the layout of every tensor operand under one choice an axis."""
    return tuple(zip(*(choice.operands for choice in choices)))


def result_layouts(choices: Sequence[Choice]) -> tuple[Layout, ...]:
    """Return the layout of every tensor result under one choice an axis."""
    return tuple(zip(*(choice.results for choice in choices)))


def legal(
    rule: Rule, choices: Sequence[Choice], operand_shapes: Shapes, result_shapes: Shapes, mesh: Mesh
) -> str | None:
    """Return why an op of these global shapes may not take ``choices``, one an axis; None when it may.

    A choice is legal when an axis of size 1 replicates, no rank holds an empty piece of a split factor or dim, an
    ``even`` factor divides by the product of all axes that split it, and no tensor mixes two kinds of partial values.
    """
    for axis, choice in enumerate(choices):
        if mesh.sizes[axis] == 1 and any(code != REPLICATE for code in (*choice.operands, *choice.results)):
            return f"axis {mesh.names[axis]} has one rank, so {choice.name} splits nothing"
    for factor in {choice.factor.name: choice.factor for choice in choices if choice.factor}.values():
        parts = [mesh.sizes[a] for a, c in enumerate(choices) if c.factor and c.factor.name == factor.name]
        if factor.even and factor.size % math.prod(parts):
            return f"{factor.name} of size {factor.size} does not divide evenly by {math.prod(parts)}"
        if not pieces_nonempty(factor.size, parts):
            return f"{factor.name} of size {factor.size} leaves an empty piece when cut by {parts}"
    sides = (
        ("operand", operand_layouts(choices), operand_shapes),
        ("result", result_layouts(choices), result_shapes),
    )
    for what, layouts, shapes in sides:
        for index, (layout, shape) in enumerate(zip(layouts, shapes)):
            fault = _layout_fault(shape, layout, mesh)
            if fault:
                return f"{what} {index}: {fault}"
    return None


def legal_strategies(
    rule: Rule, operand_shapes: Shapes, result_shapes: Shapes, mesh: Mesh
) -> Iterator[tuple[Choice, ...]]:
    """Yield every legal tuple of choices, one an axis; replicate on all axes comes first."""
    replicate = rule.choices()[:1]
    per_axis = [rule.choices() if size > 1 else replicate for size in mesh.sizes]
    for choices in product(*per_axis):
        if legal(rule, choices, operand_shapes, result_shapes, mesh) is None:
            yield choices


def _layout_fault(shape: Sequence[int], layout: Layout, mesh: Mesh) -> str | None:
    partials = sorted({code for code in layout if is_partial(code)}, reverse=True)
    if len(partials) > 1:
        return f"the layout {layout_name(layout)} mixes {' and '.join(map(code_name, partials))}: no order reduces both"
    if not layout_is_legal(shape, layout, mesh.sizes):
        return f"the layout {layout_name(layout)} leaves an empty piece of shape {tuple(shape)}"
    return None
