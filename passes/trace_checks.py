"""Checks of values that can only raise: taken to pass while a model is traced.

``assert mask.all()`` and ``if (var < 0).any(): raise ValueError`` look at data, but whatever they see, the numbers of a
run that goes on are the same. The program leaves them out; every other branch on data is refused.
"""

from __future__ import annotations

import ast
import linecache
from functools import lru_cache
from types import FrameType

Check = tuple[ast.expr, bool]
"""An expression, and the truth value with which nothing is raised."""


def passing_value(frame: FrameType | None) -> bool | None:
    """Return what the tensor that ``frame`` reads now must be so that its check passes; None if it is no check."""
    if frame is None:
        return None
    checks = [check for check in _checks(frame.f_code.co_filename) if _spans(check[0], frame.f_lineno)]
    if len(checks) != 1:
        return None
    wanted = set(_wanted(*checks[0]))
    return wanted.pop() if len(wanted) == 1 else None


def _spans(expression: ast.expr, line: int) -> bool:
    return expression.lineno <= line <= (expression.end_lineno or expression.lineno)


@lru_cache(maxsize=256)
def _checks(filename: str) -> tuple[Check, ...]:
    """Return the conditions of a file on which nothing but an exception depends; none inside of a ``try``."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return ()
    found: list[Check] = []
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Assert):
            found.append((node.test, True))
        elif isinstance(node, ast.If) and not node.orelse and all(isinstance(s, ast.Raise) for s in node.body):
            found.append((node.test, False))
        if not isinstance(node, (ast.Try, ast.TryStar)):
            stack.extend(ast.iter_child_nodes(node))
    return tuple(found)


def _wanted(expression: ast.expr, value: bool) -> list[bool]:
    """Return the truth values that the parts of a condition must have for it to be ``value``."""
    if isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.Not):
        return _wanted(expression.operand, not value)
    if isinstance(expression, ast.BoolOp):
        return [wanted for part in expression.values for wanted in _wanted(part, value)]
    if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Name) and expression.func.id == "bool":
        return _wanted(expression.args[0], value) if len(expression.args) == 1 else []
    if isinstance(expression, ast.Compare):
        return [value] if not _reads_numbers(expression) else [True, False]
    reads = (ast.Call, ast.Name, ast.Attribute, ast.Subscript)
    return [value] if isinstance(expression, reads) else [True, False]


def _reads_numbers(expression: ast.expr) -> bool:
    """Tell whether a comparison may be one of numbers that were read before, not one of tensors."""
    names = [node.attr for node in ast.walk(expression) if isinstance(node, ast.Attribute)]
    names += [node.id for node in ast.walk(expression) if isinstance(node, ast.Name)]
    return bool({"item", "tolist", "bool", "int", "float"} & set(names))
