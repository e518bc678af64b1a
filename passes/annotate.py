"""Give every op node its sharding rule."""

from __future__ import annotations

from autopar.errors import RuleError
from autopar.passes.program import Program, result_values, tensor_operands
from autopar.passes.rules import families
from autopar.passes.rules.rule import validate
from autopar.passes.rules.table import rule_of


def annotate(program: Program) -> Program:
    """Put ``meta["rule"]`` on every op node of ``program``; same program back.

    Raises:
        RuleError: a rule contradicts the shapes of its op.
    """
    families.load()
    for node in program.ops():
        rule = rule_of(node)
        operands = [tuple(operand.meta["val"].shape) for operand in tensor_operands(node)]
        results = [tuple(value.shape) for _, value in result_values(node)]
        faults = validate(rule, operands, results)
        if faults:
            raise RuleError(f"the rule of {node.target} does not fit {node.format_node()}: {'; '.join(faults)}")
        node.meta["rule"] = rule
    return program
