"""What nobody reads is left out."""

from __future__ import annotations

from typing import Any

import torch

from autopar.mesh import Mesh
from autopar.passes.improve.drop_unused import drop_unused
from autopar.passes.improve.edits import apply_edits
from autopar.passes.improve.setting import Setting
from tests.passes.improve.small_graph import SmallGraph

ATEN: Any = torch.ops.aten


def test_dead_code_goes() -> None:
    """A chain that leads nowhere; a random op and a collective stay, and so does what they read."""
    g = SmallGraph()
    x = g.input("x")
    g.op(ATEN.exp.default, g.op(ATEN.neg.default, x))
    g.op(ATEN.rand_like.default, g.op(ATEN.sin.default, x))
    g.all_reduce(g.op(ATEN.cos.default, x), "call")
    joint = g.joint(g.op(ATEN.abs.default, x))
    apply_edits([joint.graph], drop_unused(joint, Setting(Mesh((2,)), (), ())))
    joint.graph.lint()
    names = [node.name for node in joint.graph.nodes if node.op == "call_function"]
    assert names == ["sin_default", "rand_like_default", "cos_default", "call", "wait_tensor_default", "abs_default"]
