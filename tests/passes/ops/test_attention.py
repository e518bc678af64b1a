"""``autopar::attention``: the fused kernels, the plain one and torch's own attention agree for every argument."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.passes import ops as _  # noqa: F401
from autopar.passes.ops.attention_kernels import backward_math, forward_math

MASKS = ("none", "bool", "float", "row", "blind")


def tensors(dtype: torch.dtype, queries: int = 5, heads: int = 4, groups: int = 2) -> Any:
    """Return queries, keys, values and a gradient."""
    numbers, keys, width = torch.Generator().manual_seed(0), 5, 8

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers, dtype=torch.float64).to(dtype)

    q, k = draw(2, heads, queries, width), draw(2, groups, keys, width)
    return q, k, draw(2, groups, keys, width), draw(2, heads, queries, width)


def mask_of(kind: str, queries: int, keys: int, dtype: torch.dtype) -> Tensor | None:
    """Return a mask: none, bool, float, one row for all queries, or one in which a query sees nothing."""
    numbers = torch.Generator().manual_seed(1)
    if kind == "none":
        return None
    if kind == "float":
        return torch.randn(1, 4, queries, keys, generator=numbers).to(dtype)
    seen = torch.rand(2, 1, 1 if kind == "row" else queries, keys, generator=numbers) > 0.4
    seen[..., 0] = True
    if kind == "blind":
        seen[0, :, 1] = False
    return seen


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, offset: int) -> Tensor:
    """Compute attention in float64, head by head."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        ahead = torch.arange(k.shape[2])[None, :] > offset + torch.arange(q.shape[2])[:, None]
        scores = scores.masked_fill(ahead, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(("causal", "queries", "offset"), [(False, 5, 0), (True, 5, 0), (True, 2, 3), (True, 3, 0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_kernels_agree(dtype: torch.dtype, causal: bool, queries: int, offset: int, kind: str) -> None:
    """The op, the plain kernel and a float64 reference give the same result and the same three gradients."""
    q, k, v, grad = tensors(dtype, queries)
    mask = mask_of(kind, queries, 5, dtype)
    arguments = (mask, causal, 0.3, offset)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    expected = reference(*leaves, *arguments)
    gradients = torch.autograd.grad(expected, leaves, grad.double())
    near = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]

    def close(found: Tensor, wanted: Tensor) -> None:
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, rtol=near, atol=near)

    out, lse = torch.ops.autopar.attention(q, k, v, *arguments)
    plain, plain_lse = forward_math(q, k, v, *arguments)
    for found in (out, plain):
        close(found, expected.detach())
    assert lse.dtype == plain_lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for found in (
        torch.ops.autopar.attention_backward(grad, q, k, v, out, lse, *arguments),
        backward_math(grad, q, k, v, plain, plain_lse, *arguments),
    ):
        for mine, theirs in zip(found, gradients, strict=True):
            close(mine, theirs)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_torch(causal: bool, heads: tuple[int, int]) -> None:
    """Result and gradients through autograd are those of ``F.scaled_dot_product_attention``."""
    q, k, v, grad = tensors(torch.float32, heads=heads[0], groups=heads[1])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = torch.ops.autopar.attention(*leaves, None, causal, 0.25, 0)
    assert not lse.requires_grad
    expected = F.scaled_dot_product_attention(*leaves, is_causal=causal, scale=0.25, enable_gqa=True)
    torch.testing.assert_close(out, expected)
    for mine, theirs in zip(torch.autograd.grad(out, leaves, grad), torch.autograd.grad(expected, leaves, grad)):
        torch.testing.assert_close(mine, theirs)


def test_other_value_width() -> None:
    """Values may have another width than keys; sixteen bit floats of the other kind work too."""
    q, k = tensors(torch.float32)[:2]
    v = torch.randn(2, 2, 5, 3)
    out, lse = torch.ops.autopar.attention(q, k, v, None, True, 0.3, 0)
    torch.testing.assert_close(out.double(), reference(q, k, v, None, True, 0.3, 0), rtol=1e-5, atol=1e-5)
    assert out.shape == (2, 4, 5, 3) and lse.shape == (2, 4, 5)
    half = [x.half() for x in (q, k, v)]
    close = torch.ops.autopar.attention(*half, None, True, 0.3, 0)[0]
    torch.testing.assert_close(close.float(), out, rtol=1e-2, atol=1e-2)


def test_fake_kernels() -> None:
    """Fake results have the shapes, dtypes and strides of real ones, forward and backward."""
    q, k, v, grad = tensors(torch.bfloat16, queries=3)
    arguments = (mask_of("bool", 3, 5, torch.bfloat16), True, 0.3, 2)
    torch.library.opcheck(
        torch.ops.autopar.attention.default, (q, k, v, *arguments), test_utils=("test_schema", "test_faketensor")
    )
    out, lse = torch.ops.autopar.attention(q, k, v, *arguments)
    torch.library.opcheck(
        torch.ops.autopar.attention_backward.default,
        (grad, q, k, v, out, lse, *arguments),
        test_utils=("test_schema", "test_faketensor"),
    )
    meta = [x.to("meta") for x in (q, k, v)]
    assert torch.ops.autopar.attention(*meta, None, True, 0.3, 2)[0].stride() == out.stride()
