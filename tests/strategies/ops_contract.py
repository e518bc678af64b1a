"""Arguments for contractions and attention."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.strategies.op_draws import FLOATS, WIDE, Arguments, Draw, generates

aten = torch.ops.aten


def enter_contractions() -> None:
    """Enter the generators of the contract family."""

    @generates(torch.ops.autopar.contract.default, dtypes=FLOATS)
    def contract(d: Draw) -> Arguments:
        letters = {"a": d.size(), "b": d.size(), "c": d.size(), "k": d.size(), "n": d.size()}
        equation = d.of(
            [
                "abk,nk->abn",
                "abk,kn->abn",
                "abn,abk->nk",
                "bk,nk->bn",
                "abcn,abnk->abck",
                "k,nk->n",
                "ab,ab->",
                "ab,cn->abcn",
            ]
        )
        return (*[d.float(*(letters[x] for x in text)) for text in equation.split("->")[0].split(",")], equation), {}

    @generates(aten.mm.default)
    def mm(d: Draw) -> Arguments:
        m, k, n = d.size(), d.size(), d.size()
        return (d.float(m, k), d.float(k, n)), {}

    @generates(aten.bmm.default)
    def bmm(d: Draw) -> Arguments:
        b, m, k, n = d.size(), d.size(), d.size(), d.size()
        return (d.float(b, m, k), d.float(b, k, n)), {}

    @generates(aten.dot.default)
    def dot(d: Draw) -> Arguments:
        k = d.size()
        return (d.float(k), d.float(k)), {}

    @generates(aten.mv.default)
    def mv(d: Draw) -> Arguments:
        m, k = d.size(), d.size()
        return (d.float(m, k), d.float(k)), {}

    @generates(aten.einsum.default, dtypes=WIDE)
    def einsum(d: Draw) -> Arguments:
        letters = {"a": d.size(), "b": d.size(), "k": d.size(), "n": d.size()}
        equation = d.of(
            ["abk,nk->abn", "abk,ank->abn", "ak,kn->na", "ab->ba", "ab->a", "ab,kb->", "aab->b", "...b,b->...b"]
        )
        texts = equation.split("->")[0].replace("...", "a").split(",")
        return (equation, [d.float(*(letters[x] for x in text)) for text in texts]), {}

    @generates(aten.matmul.default, dtypes=WIDE)
    def matmul(d: Draw) -> Arguments:
        lead, m, k, n = d.shape(0, 2), d.size(), d.size(), d.size()
        other = d.of([lead, (), tuple(1 for _ in lead), lead[1:]])
        return (d.float(*lead, m, k), d.float(*other, k, n)), {}

    @generates(aten.addmm.default, dtypes=WIDE)
    def addmm(d: Draw) -> Arguments:
        m, k, n = d.size(), d.size(), d.size()
        bias = d.float(*d.of([(n,), (m, n), (1, n), (m, 1)]))
        return (bias, d.float(m, k), d.float(k, n)), d.of([{}, {"beta": 0.5, "alpha": 2.0}])

    @generates(aten.addmv.default, dtypes=WIDE)
    def addmv(d: Draw) -> Arguments:
        m, k = d.size(), d.size()
        return (d.float(m), d.float(m, k), d.float(k)), {}

    @generates(aten.baddbmm.default, aten.addbmm.default, dtypes=WIDE)
    def baddbmm(d: Draw) -> Arguments:
        b, m, k, n = d.size(), d.size(), d.size(), d.size()
        return (d.float(m, n), d.float(b, m, k), d.float(b, k, n)), {}

    @generates(aten.linear.default, dtypes=WIDE)
    def linear(d: Draw) -> Arguments:
        lead, k, n = d.shape(1, 3), d.size(), d.size()
        bias = d.of([None, d.float(n)])
        return (d.float(*lead, k), d.float(n, k), bias), {}


def enter_attention() -> None:
    """Enter the generators of the attention family."""

    def operands(d: Draw) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool, float, int]:
        batch, groups, queries, width, value_width = d.size(), d.of([1, 2, 3, 4]), d.size(), d.int(1, 4), d.int(1, 4)
        heads = groups * d.int(1, 3)
        offset = d.int(0, 2)
        keys = queries + offset
        mask_shape = [n if d.bool() else 1 for n in (batch, heads, queries, keys)]
        mask = d.of([None, d.mask(*mask_shape), d.float(*mask_shape)])
        if mask is not None and mask.dtype is torch.bool:
            mask[..., 0] = True
        q, k, v = d.float(batch, heads, queries, width), d.float(batch, groups, keys, width), None
        v = d.float(batch, groups, keys, value_width)
        return q, k, v, mask, d.bool(), 0.5, offset

    @generates(torch.ops.autopar.attention.default, dtypes=WIDE)
    def attention(d: Draw) -> Arguments:
        return operands(d), {}

    @generates(torch.ops.autopar.attention_backward.default, dtypes=WIDE)
    def attention_backward(d: Draw) -> Arguments:
        q, k, v, *rest = operands(d)
        out, lse = torch.ops.autopar.attention(q, k, v, *rest)
        return (d.float(*out.shape), q, k, v, out, lse, *rest), {}
