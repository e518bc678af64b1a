"""What a plan says of single nodes, as rules and layouts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.errors import LoweringError
from autopar.mesh import Mesh
from autopar.placement import Layout, parse_layout
from autopar.plans import Plan

from .program import Input, result_values, tensor_operands
from .rules.legality import legal
from .rules.rule import Choice, Rule


def choices_of(node: fx.Node, names: Sequence[str], mesh: Mesh) -> tuple[Choice, ...]:
    """Return the choices that a plan names for an op, one an axis.

    Raises:
        LoweringError: wrong number of names, an unknown one, or choices that are not legal together.
    """
    rule: Rule = node.meta["rule"]
    if len(names) != mesh.num_axes:
        raise LoweringError(f"the plan has {len(names)} choices for {node.name} on a mesh of {mesh.num_axes} axes")
    table = {choice.name: choice for choice in rule.choices()}
    for name in names:
        if name not in table:
            raise LoweringError(f"{node.name} ({node.target}) has no choice {name!r}; it has {', '.join(table)}")
    choices = tuple(table[name] for name in names)
    operands = [tuple(operand.meta["val"].shape) for operand in tensor_operands(node)]
    results = [tuple(value.shape) for _, value in result_values(node)]
    fault = legal(rule, choices, operands, results, mesh)
    if fault:
        raise LoweringError(f"{node.name} ({node.target}) can't take the choices {tuple(names)}: {fault}")
    return choices


def input_layout(role: Input, plan: Plan) -> Layout:
    """Return the layout in which a placeholder is passed: where it rests, or, for a tangent, where its output lies.

    Raises:
        LoweringError: the plan does not say.
    """
    tables = {"parameter": plan.parameters, "buffer": plan.parameters, "input": plan.inputs, "tangent": plan.outputs}
    text = tables[role.kind].get(role.name)
    if text is None:
        raise LoweringError(f"the plan does not say where the {role.kind} {role.name} lies")
    return parse_layout(text)
