"""The table of rules: op -> function of the node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from autopar.passes.program import result_values, tensor_operands
from autopar.passes.rules.rule import Rule

RuleFunction = Callable[[fx.Node], Rule]

_TABLE: dict[Any, RuleFunction] = {}


def rule(*targets: Any) -> Callable[[RuleFunction], RuleFunction]:
    """Enter a function into the table as the rule of ``targets``."""

    def enter(function: RuleFunction) -> RuleFunction:
        for target in targets:
            if target in _TABLE:
                raise ValueError(f"{target} has two rules: {_TABLE[target].__name__} and {function.__name__}")
            _TABLE[target] = function
        return function

    return enter


def has_rule(target: Any) -> bool:
    """Tell whether an op is in the table."""
    return target in _TABLE


def rule_function(target: Any) -> RuleFunction:
    """Return the function that gives the rule of an op in the table."""
    return _TABLE[target]


def known_targets() -> list[Any]:
    """Return every op in the table, by name."""
    return sorted(_TABLE, key=str)


def replicated_rule(node: fx.Node, reason: str) -> Rule:
    """Return the rule of an op that nothing may split."""
    operands = tuple((None,) * operand.meta["val"].dim() for operand in tensor_operands(node))
    results = tuple((None,) * value.dim() for _, value in result_values(node))
    return Rule((), operands, results, reason=reason)


def rule_of(node: fx.Node) -> Rule:
    """Return the rule of an op node; that of an op which is not in the table is discovered."""
    if node.op == "get_attr":
        return replicated_rule(node, "")
    function = _TABLE.get(node.target)
    if function is not None:
        return function(node)
    from autopar.passes.rules.discover import discover  # it checks rules, so it stands on this table

    return discover(node)
