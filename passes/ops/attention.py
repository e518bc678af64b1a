"""``autopar::attention``: scaled dot product attention kept whole, the same op on every device.

``q`` [B, H, L, E], ``k`` [B, G, S, E], ``v`` [B, G, S, D]; query head ``h`` reads key head ``h // (H // G)``. With
``causal``, query ``i`` stands at position ``offset + i`` and sees keys ``j <= offset + i``: a piece of the queries can
then attend to all keys. Results are ``out`` [B, H, L, D] and ``lse`` [B, H, L], the log of each row's normaliser. A row
that sees no key gives zeros. ``out`` and the gradients lie in memory as [B, L, H, D], so that viewing the heads as one
dim copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import attention_kernels
from .library import LIBRARY

LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale, int offset)"
    " -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? mask,"
    " bool causal, float scale, int offset) -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, offset: int
) -> tuple[Tensor, Tensor]:
    rows = q.shape[:-1]
    return _like_rows(q, (*rows, v.shape[-1])), q.new_empty(rows, dtype=attention_kernels.lse_dtype(q.dtype))


def _fake_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _like_rows(q, q.shape), _like_rows(k, k.shape), _like_rows(v, v.shape)


def _like_rows(x: Tensor, shape: Sequence[int]) -> Tensor:
    batch, heads, length, width = shape
    return x.new_empty((batch, length, heads, width)).transpose(1, 2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, ctx.causal, ctx.scale, ctx.offset = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, mask)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, mask = ctx.saved_tensors
    grads = torch.ops.autopar.attention_backward.default(
        grad, q, k, v, out, lse, mask, ctx.causal, ctx.scale, ctx.offset
    )
    wanted = [g if need else None for g, need in zip(grads, ctx.needs_input_grad)]
    return (*wanted, None, None, None, None)


torch.library.register_fake("autopar::attention", _fake, lib=LIBRARY)
torch.library.register_fake("autopar::attention_backward", _fake_backward, lib=LIBRARY)
torch.library.impl("autopar::attention", "cpu", attention_kernels.forward_cpu, lib=LIBRARY)
torch.library.impl("autopar::attention", "cuda", attention_kernels.forward_cuda, lib=LIBRARY)
torch.library.impl("autopar::attention_backward", "cpu", attention_kernels.backward_cpu, lib=LIBRARY)
torch.library.impl("autopar::attention_backward", "cuda", attention_kernels.backward_cuda, lib=LIBRARY)
torch.library.register_autograd("autopar::attention", _backward, setup_context=_save, lib=LIBRARY)
