"""Matrix products are traced as ``autopar::contract``, with every leading dim in sight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .trace_flat import FlatViews

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def contract(a: Tensor, b: Tensor, equation: str) -> Tensor:
    """Contract two operands; under autocast both are cast to its dtype first, as torch casts those of a product."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        a, b = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (a, b))
    result: Tensor = torch.ops.autopar.contract.default(a, b, equation)
    return result


def linear(flat: FlatViews, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Trace ``F.linear``."""
    if weight.dim() != 2 or input.dim() < 1:
        return NotImplemented
    known = flat.whole(input) if input.dim() == 2 else None
    if known is not None:
        return flat.flatten(linear(flat, known[0], weight, bias), known[1])
    rows = _LETTERS[: input.dim() - 1]
    k, n = _LETTERS[len(rows)], _LETTERS[len(rows) + 1]
    product = contract(input, weight, f"{rows}{k},{n}{k}->{rows}{n}")
    return product if bias is None else product + bias.to(product.dtype)


def matmul(
    flat: FlatViews, input: Tensor, other: Tensor | None = None, *, out: Tensor | None = None, **named: Any
) -> Any:
    """Trace ``torch.matmul``, ``mm``, ``bmm``, ``mv`` and ``dot``; leading dims broadcast.

    The second operand has another name in each of them.
    """
    other = next(iter(named.values()), other)
    if out is not None or not isinstance(other, Tensor) or 0 in (input.dim(), other.dim()):
        return NotImplemented
    known = flat.whole(input) if input.dim() == 2 and other.dim() == 2 else None
    if known is not None:
        return flat.flatten(matmul(flat, known[0], other), known[1])
    lead_a, lead_b = input.shape[:-2], other.shape[:-2]
    lead = torch.broadcast_shapes(lead_a, lead_b)
    names = _LETTERS[: len(lead)]
    i, k, j = list(_LETTERS[len(lead) : len(lead) + 3])
    a, batch_a = _squeeze_broadcast(input, lead_a, lead, names)
    b, batch_b = _squeeze_broadcast(other, lead_b, lead, names)
    rows = i if input.dim() > 1 else ""
    columns = j if other.dim() > 1 else ""
    product = contract(
        a, b, f"{batch_a}{rows}{k},{batch_b}{k}{columns}->{_kept(names, batch_a + batch_b)}{rows}{columns}"
    )
    return product.reshape(*lead, *product.shape[product.dim() - len(rows + columns) :]) if lead else product


def _squeeze_broadcast(x: Tensor, own: torch.Size, lead: torch.Size, names: str) -> tuple[Tensor, str]:
    """Return ``x`` without the leading dims that broadcast, and the letters of those that stay."""
    shift = len(lead) - len(own)
    gone = [d for d, size in enumerate(own) if size == 1 and lead[shift + d] != 1]
    letters = "".join(names[shift + d] for d in range(len(own)) if d not in gone)
    return (x.squeeze(gone) if gone else x), letters


def _kept(names: str, used: str) -> str:
    return "".join(letter for letter in names if letter in used)


def addmm(
    flat: FlatViews, input: Tensor, *factors: Any, beta: float = 1, alpha: float = 1, out: Any = None, **named: Any
) -> Any:
    """Trace ``addmm``, ``baddbmm`` and ``addmv`` as a product and a sum."""
    factors = (*factors, *named.values())
    if out is not None or len(factors) != 2 or not all(isinstance(x, Tensor) for x in (input, *factors)):
        return NotImplemented
    mat1, mat2 = factors
    known = flat.whole(mat1) if mat1.dim() == 2 and mat2.dim() == 2 and input.dim() == 1 else None
    if known is not None:
        whole = addmm(flat, input, known[0], mat2, beta=beta, alpha=alpha)
        return flat.flatten(whole, known[1])
    product = matmul(flat, mat1, mat2)
    if product is NotImplemented:
        return NotImplemented
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product
    return product + (input if beta == 1 else input * beta).to(product.dtype)


def einsum(flat: FlatViews, equation: Any, *operands: Any) -> Any:
    """Trace an einsum of two operands; sums that one operand does alone come first, broadcast dims are squeezed."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or not all(isinstance(x, Tensor) for x in operands):
        return NotImplemented
    if operands[0].dtype != operands[1].dtype and not torch.is_autocast_enabled("cpu"):
        return NotImplemented
    text = equation.replace(" ", "")
    if "." in text:
        return NotImplemented
    text, letters = _small_letters(text)
    left, _, right = text.partition(",")
    right, arrow, out = right.partition("->")
    if not arrow:
        out = "".join(sorted(x for x in letters if (left + right).count(letters[x]) == 1))
        out = "".join(letters[x] for x in out)
    if any(len(set(part)) != len(part) for part in (left, right, out)) or set(out) - set(left + right):
        return NotImplemented
    a, left = _sum_alone(operands[0], left, right + out)
    b, right = _sum_alone(operands[1], right, left + out)
    sizes = {letter: size for x, part in ((a, left), (b, right)) for letter, size in zip(part, x.shape) if size != 1}
    a, left = _squeeze_ones(a, left, right, sizes)
    b, right = _squeeze_ones(b, right, left, sizes)
    if (set(left) ^ set(right)) - set(out):
        return NotImplemented
    return contract(a, b, f"{left},{right}->{out}")


def _small_letters(text: str) -> tuple[str, dict[str, str]]:
    """Return the equation with its letters renamed to ``a``, ``b``, ... and the names, in order of appearance."""
    found = list(dict.fromkeys(letter for letter in text if letter.isalpha()))
    names = dict(zip(found, _LETTERS))
    return "".join(names.get(letter, letter) for letter in text), names


def _sum_alone(x: Tensor, own: str, others: str) -> tuple[Tensor, str]:
    alone = [d for d, letter in enumerate(own) if letter not in others]
    return (x.sum(alone), "".join(letter for letter in own if letter in others)) if alone else (x, own)


def _squeeze_ones(x: Tensor, own: str, other: str, sizes: dict[str, int]) -> tuple[Tensor, str]:
    gone = [d for d, letter in enumerate(own) if x.shape[d] == 1 and letter in sizes and letter in other]
    return (x.squeeze(gone), "".join(c for d, c in enumerate(own) if d not in gone)) if gone else (x, own)


def _reversed_matmul(flat: FlatViews, input: Tensor, other: Tensor) -> Any:
    return matmul(flat, other, input) if isinstance(other, Tensor) else NotImplemented


REWRITES: dict[Any, Callable[..., Any]] = {
    F.linear: linear,
    **dict.fromkeys(
        (
            torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm,
            torch.mv, Tensor.mv, torch.dot, Tensor.dot, torch.linalg.matmul,
        ),
        matmul,
    ),
    Tensor.__rmatmul__: _reversed_matmul,
    **dict.fromkeys(
        (torch.addmm, torch.baddbmm, torch.addmv, Tensor.addmm, Tensor.baddbmm, Tensor.addmv),
        addmm,
    ),
    torch.einsum: einsum,
}  # fmt: skip
"""Torch function -> its rewrite."""
