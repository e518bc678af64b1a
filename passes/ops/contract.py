"""``autopar::contract``: an einsum of two operands, which keeps every dim of a matrix product in sight.

A letter stands for one dim of one size. No operand repeats a letter; a letter that the result lacks is in both operands
and is summed. Gradients of a contraction are contractions, so the op is closed under differentiation.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar.errors import AutoparError

from .library import LIBRARY

LIBRARY.define("contract(Tensor a, Tensor b, str equation) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


@lru_cache(maxsize=4096)
def parse_equation(equation: str) -> tuple[str, str, str]:
    """Return the letters of ``a``, ``b`` and the result.

    >>> parse_equation("abk,nk->abn")
    ('abk', 'nk', 'abn')

    Raises:
        AutoparError: a letter repeats, comes from nowhere, or is summed though one operand lacks it.
    """
    operands, arrow, out = equation.partition("->")
    a, comma, b = operands.partition(",")
    letters = a + b + out
    fault = ""
    if not arrow or not comma or not all(letter.islower() for letter in letters):
        fault = "it is not of the form 'ab,bc->ac'"
    elif any(len(set(part)) != len(part) for part in (a, b, out)):
        fault = "a letter stands twice in one operand"
    elif set(out) - set(a + b):
        fault = "the result has a letter that no operand has"
    elif (set(a) ^ set(b)) - set(out):
        fault = "a summed letter must be in both operands"
    if fault:
        raise AutoparError(f"contract was asked for {equation!r}: {fault}")
    return a, b, out


def result_shape(a: Tensor, b: Tensor, equation: str) -> list[int]:
    """Return the shape of a contraction's result.

    Raises:
        AutoparError: the operands do not have the equation's dims, a letter has two sizes, or the dtypes differ.
    """
    left, right, out = parse_equation(equation)
    if a.dtype != b.dtype:
        raise AutoparError(f"contract {equation!r} got operands of dtypes {a.dtype} and {b.dtype}; cast one of them")
    sizes: dict[str, int] = {}
    for letters, operand in ((left, a), (right, b)):
        if len(letters) != operand.dim():
            raise AutoparError(f"contract {equation!r} got an operand of shape {tuple(operand.shape)}")
        for letter, size in zip(letters, operand.shape):
            if sizes.setdefault(letter, size) != size:
                shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
                raise AutoparError(f"contract {equation!r} got operands of shapes {shapes}: {letter!r} has two sizes")
    return [sizes[letter] for letter in out]


def _fake(a: Tensor, b: Tensor, equation: str) -> Tensor:
    return a.new_empty(result_shape(a, b, equation))


def _kernel(a: Tensor, b: Tensor, equation: str) -> Tensor:
    result_shape(a, b, equation)
    left, right, out = parse_equation(equation)
    if left and len(right) == 2 and right == out[-1:] + left[-1] and out[:-1] == left[:-1]:
        result = torch.nn.functional.linear(a, b)
    else:
        result = torch.einsum(f"{left},{right}->{out}", a, b)
    return result.contiguous()


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, ctx.equation = inputs
    need_a, need_b = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if need_b else None, b if need_a else None)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    a, b = ctx.saved_tensors
    left, right, out = parse_equation(ctx.equation)
    contract = torch.ops.autopar.contract.default
    grad_a = contract(grad, _conjugate(b), f"{out},{right}->{left}") if ctx.needs_input_grad[0] else None
    grad_b = contract(grad, _conjugate(a), f"{out},{left}->{right}") if ctx.needs_input_grad[1] else None
    return grad_a, grad_b, None


def _conjugate(tensor: Tensor) -> Tensor:
    return torch.conj_physical(tensor) if tensor.is_complex() else tensor


torch.library.register_fake("autopar::contract", _fake, lib=LIBRARY)
torch.library.impl("autopar::contract", ("cpu", "cuda"), _kernel, lib=LIBRARY)
torch.library.register_autograd("autopar::contract", _backward, setup_context=_save, lib=LIBRARY)
