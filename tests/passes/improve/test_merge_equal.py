"""What is computed twice is computed once."""

from __future__ import annotations

from typing import Any

import torch

from autopar.mesh import Mesh
from autopar.passes.improve.edits import Merge, apply_edits
from autopar.passes.improve.merge_equal import merge_equal
from autopar.passes.improve.setting import Setting
from tests.passes.improve.small_graph import SmallGraph

ATEN: Any = torch.ops.aten
SETTING = Setting(Mesh((2,)), (), ())


def test_equal_ops_become_one() -> None:
    """Chains of them too; numbers may differ from rank to rank, random ops draw, and some are computed again."""
    g = SmallGraph()
    x = g.input("x")
    one, two = (g.op(ATEN.exp.default, g.op(ATEN.neg.default, x)) for _ in range(2))
    cuts = [g.op(ATEN.slice.Tensor, x, 0, 0, 2) for _ in range(2)]
    draws = [g.op(ATEN.rand_like.default, x) for _ in range(2)]
    again = [g.op(ATEN.sin.default, x), g.op(ATEN.sin.default, x, again=True)]
    joint = g.joint(one, two, *cuts, *draws, *again)
    edits = merge_equal(joint, SETTING)
    assert [(e.second, e.first) for e in edits if isinstance(e, Merge)] == [
        ("neg_default_1", "neg_default"),
        ("exp_default_1", "exp_default"),
    ]
    apply_edits([joint.graph], edits)
    joint.graph.lint()
    assert joint.graph.output_node().args[0][:2] == (one, one)  # type: ignore[index]


def test_a_budget_keeps_them_apart() -> None:
    """The first result would live until the last use of the second."""
    g = SmallGraph()
    x = g.input("x")
    joint = g.joint(*(g.op(ATEN.exp.default, x) for _ in range(2)))
    assert merge_equal(joint, SETTING) != []
    assert merge_equal(joint, Setting(Mesh((2,)), (), (), memory_bytes=1)) == []
