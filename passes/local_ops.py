"""Choose the library op that carries out an op of the program on local tensors."""

from __future__ import annotations

from typing import Any

import torch

_ATEN: Any = torch.ops.aten


def local_op(target: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return the op and arguments to run in place of ``target``: most ops are their own.

    ``contract`` becomes ``linear``, ``matmul`` or ``einsum`` by its equation; a view becomes a reshape, because a piece
    need not have the strides of the whole.

    >>> local_op(torch.ops.aten.view.default, ("x", [2, 3]))[0]
    <OpOverload(op='aten.reshape', overload='default')>
    """
    if str(target) == "autopar.contract.default" and len(args) == 3:
        return _contract(args[0], args[1], str(args[2]))
    if target in (_ATEN.view.default, _ATEN._unsafe_view.default):
        return _ATEN.reshape.default, args
    return target, args


def _contract(a: Any, b: Any, equation: str) -> tuple[Any, tuple[Any, ...]]:
    operands, out = equation.replace(" ", "").split("->")
    left, right = operands.split(",")
    if _is_linear(left, right, out):
        return _ATEN.linear.default, (a, b)
    if _is_matmul(left, right, out):
        return _ATEN.matmul.default, (a, b)
    if _is_matmul(right, left, out):
        return _ATEN.matmul.default, (b, a)
    return _ATEN.einsum.default, (f"{left},{right}->{out}", [a, b])


def _is_linear(left: str, right: str, out: str) -> bool:
    return len(right) == 2 and left != "" and left[-1] == right[1] and out == left[:-1] + right[0]


def _is_matmul(left: str, right: str, out: str) -> bool:
    """Tell whether an equation is ``B m k, B k n -> B m n`` or ``... m k, k n -> ... m n``."""
    if len(left) < 2 or len(right) < 2 or left[-1] != right[-2] or out != left[:-1] + right[-1]:
        return False
    batch = right[:-2]
    return batch == "" or (batch == left[:-2])
