"""Checks of values that can only raise: taken to pass while a model is traced.

``assert mask.all()`` and ``if (var < 0).any(): raise ValueError`` look at data, but whatever they see, the numbers of a
run that goes on are the same. The program leaves them out; every other branch on data is refused.
"""

from __future__ import annotations

import ast
import itertools
import linecache
from functools import lru_cache
from types import FrameType

Check = tuple[ast.expr, bool]
"""An expression, and the truth value with which nothing is raised."""


class PassingNumber:
    """A number that was read for a check: every comparison with it says what lets the check pass."""

    def __init__(self, passing: bool) -> None:
        self._passing = passing

    def _compare(self, other: object) -> bool:
        return self._passing

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _compare  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


def passing_number(frame: FrameType | None) -> PassingNumber | None:
    """Return what stands for the number that ``frame`` reads now when it is compared in a check; None if it is none."""
    found = _check_at(frame)
    if found is None:
        return None
    expression, value = found
    sides = [expression.left, *expression.comparators] if isinstance(expression, ast.Compare) else []
    alone = len(sides) == 2 and all(
        isinstance(side, (ast.Call, ast.Name, ast.Attribute, ast.Constant)) for side in sides
    )
    return PassingNumber(value) if alone else None


def passing_value(frame: FrameType | None) -> bool | None:
    """Return what the tensor that ``frame`` reads now must be so that its check passes; None if it is no check."""
    found = _check_at(frame)
    if frame is None or found is None:
        return None
    parts = _wanted(*found)
    wanted = {value for part, value in parts if _holds(part, frame)} or {value for _, value in parts}
    return wanted.pop() if len(wanted) == 1 else None


def _holds(expression: ast.expr, frame: FrameType) -> bool:
    """Tell whether what ``frame`` runs now, or has run just before a jump on its result, belongs to an expression."""
    at = frame.f_lasti // 2
    for first, last, start, end in itertools.islice(frame.f_code.co_positions(), max(0, at - 1), at + 1):
        if first is None or last is None or start is None or end is None:
            continue
        after = (expression.lineno, expression.col_offset) <= (first, start)
        if after and (last, end) <= (expression.end_lineno or 0, expression.end_col_offset or 0):
            return True
    return False


def _check_at(frame: FrameType | None) -> Check | None:
    if frame is None:
        return None
    checks = [check for check in _checks(frame.f_code.co_filename) if _spans(check[0], frame.f_lineno)]
    return checks[0] if len(checks) == 1 else None


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
        elif isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ast.Raise):
            found.append((node.test, False))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _is_check(node.value.func):
            found += [(argument, True) for argument in node.value.args if isinstance(argument, (ast.Call, ast.Compare))]
        if not isinstance(node, (ast.Try, ast.TryStar)):
            stack.extend(ast.iter_child_nodes(node))
    return tuple(found)


def _is_check(function: ast.expr) -> bool:
    """Tell whether a function is one of torch's that raise unless an argument is true: ``torch._check`` and its kin."""
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name.startswith("_check")


def _wanted(expression: ast.expr, value: bool) -> list[Check]:
    """Return the parts of a condition with the truth values that they must have for it to be ``value``."""
    if isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.Not):
        return _wanted(expression.operand, not value)
    if isinstance(expression, ast.BoolOp):
        return [wanted for part in expression.values for wanted in _wanted(part, value)]
    if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Name) and expression.func.id == "bool":
        return _wanted(expression.args[0], value) if len(expression.args) == 1 else []
    plain = isinstance(expression, (ast.Call, ast.Name, ast.Attribute, ast.Subscript))
    if plain or (isinstance(expression, ast.Compare) and not _reads_numbers(expression)):
        return [(expression, value)]
    return [(expression, True), (expression, False)]


def _reads_numbers(expression: ast.expr) -> bool:
    """Tell whether a comparison may be one of numbers that were read before, not one of tensors."""
    names = [node.attr for node in ast.walk(expression) if isinstance(node, ast.Attribute)]
    names += [node.id for node in ast.walk(expression) if isinstance(node, ast.Name)]
    return bool({"item", "tolist", "bool", "int", "float"} & set(names))
