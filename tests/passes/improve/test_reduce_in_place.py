"""All-reduces without a copy, where nobody can see it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from autopar.mesh import Mesh
from autopar.passes.improve.edits import Retarget
from autopar.passes.improve.memories import may_be_view
from autopar.passes.improve.reduce_in_place import reduce_in_place
from autopar.passes.improve.setting import Setting
from tests.passes.improve.small_graph import SmallGraph

ATEN: Any = torch.ops.aten


def in_place(joint: fx.GraphModule, setting: Setting | None = None) -> list[str]:
    """Return the calls that work in place."""
    edits = reduce_in_place(joint, setting or Setting(Mesh((2,)), (), ()))
    return [edit.name for edit in edits if isinstance(edit, Retarget)]


def test_a_fresh_tensor_is_summed_where_it_lies() -> None:
    """Through a view too, if that is all that reads it."""
    g = SmallGraph()
    made = g.op(ATEN.neg.default, g.input("x"))
    viewed = g.op(ATEN.contiguous.default, made)
    assert in_place(g.joint(g.all_reduce(viewed, "call"))) == ["call"]


@pytest.mark.parametrize("budget", [None, 1])
def test_a_slice_is_copied_under_a_budget(budget: int | None) -> None:
    """A sum in place of a slice would keep the whole alive; of all of it, it keeps no more than a copy would."""
    g = SmallGraph((4,))
    x = g.input("x")
    piece = g.op(ATEN.slice.Tensor, g.op(ATEN.neg.default, x), 0, 0, 2)
    piece.meta["val"] = torch.empty(2, device="meta")
    ends = [g.all_reduce(piece, "part"), g.all_reduce(g.op(ATEN.exp.default, x), "whole")]
    next(n for n in g.graph.nodes if n.name == "part").meta["val"] = piece.meta["val"]
    setting = Setting(Mesh((2,)), (), (), memory_bytes=budget)
    assert in_place(g.joint(*ends), setting) == (["part", "whole"] if budget is None else ["whole"])


@pytest.mark.parametrize("how", ["input", "view of an input", "output", "read behind", "view read behind", "kept"])
def test_what_somebody_else_may_read_is_copied(how: str) -> None:
    """Inputs, outputs, whatever is read behind the call, also through a view, and copies that are kept."""
    g = SmallGraph()
    x = g.input("x")
    made = g.op(ATEN.neg.default, x, name="made", tensor="made", layout=(-1,))
    viewed = g.op(ATEN.reshape.default, made, [4])
    operand = {"input": x, "view of an input": g.op(ATEN.contiguous.default, x)}.get(how, made)
    ends = [g.all_reduce(operand, "call")]
    if "behind" in how:
        ends.append(g.op(ATEN.exp.default, viewed if "view" in how else made))
    if how == "output":
        ends.append(made)
    kept = frozenset({("made", (-1,))} if how == "kept" else ())
    assert in_place(g.joint(*ends), Setting(Mesh((2,)), (), (), kept)) == []


def test_what_may_be_a_view() -> None:
    """By its schema, or because a composite op may return its operand; products of two are always new."""
    g = SmallGraph()
    x, y = g.input("x"), g.input("y")
    views = [ATEN.reshape.default, ATEN.contiguous.default, ATEN.slice.Tensor, ATEN.to.dtype, ATEN.dropout.default]
    assert all(may_be_view(g.op(target, x)) for target in views)
    new = [ATEN.neg.default, ATEN._to_copy.default, ATEN.sum.default]
    assert not any(may_be_view(g.op(target, x)) for target in new)
    assert not may_be_view(g.op(ATEN.linear.default, x, y))
    assert not may_be_view(g.op(ATEN.einsum.default, "ab,bc->ac", [x, y]))
    assert may_be_view(g.op(ATEN.einsum.default, "ab->ba", [x]))
