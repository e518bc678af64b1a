"""Ops that write into an operand, where nobody can see it."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autopar.mesh import Mesh
from autopar.passes.improve.edits import apply_edits
from autopar.passes.improve.setting import Setting
from autopar.passes.improve.write_in_place import write_in_place, written_arguments
from autopar.passes.program import Output
from tests.passes.improve.small_graph import C10D, SmallGraph

ATEN: Any = torch.ops.aten
LIBRARY = torch.library.Library("autopar_test_write_in_place", "DEF")
LIBRARY.define("parts(Tensor x, int size) -> Tensor[]")
SOMEBODYS: Any = torch.ops.autopar_test_write_in_place
SETTING = Setting(Mesh((2,)), (), ())


def targets(joint: fx.GraphModule) -> list[str]:
    """Return the ops of the graph after the pass."""
    apply_edits([joint.graph], write_in_place(joint, SETTING))
    joint.graph.lint()
    return [str(node.target) for node in joint.graph.nodes if node.op == "call_function"]


def test_a_chain_takes_one_memory() -> None:
    """Each op writes where the one before wrote; the numbers are those from before."""
    g = SmallGraph()
    x = g.input("x")
    y = g.op(ATEN.mul.Tensor, g.op(ATEN.exp.default, g.op(ATEN.neg.default, x)), x)
    joint = g.joint(y)
    assert targets(joint) == ["aten.neg.default", "aten.exp_.default", "aten.mul_.Tensor"]
    value = torch.randn(4)
    (result,) = fx.Interpreter(fx.GraphModule({}, joint.graph)).run(value.clone())
    assert torch.equal(result, torch.exp(-value) * value)


def test_into_the_second_operand() -> None:
    """By the form that is told where to write."""
    g = SmallGraph()
    x = g.input("x")
    joint = g.joint(g.op(ATEN.sub.Tensor, x, g.op(ATEN.neg.default, x)))
    assert targets(joint) == ["aten.neg.default", "aten.sub.out"]
    value = torch.randn(4)
    assert torch.equal(fx.Interpreter(fx.GraphModule({}, joint.graph)).run(value)[0], value + value)


@pytest.mark.parametrize("split", [ATEN.unsafe_split.Tensor, SOMEBODYS.parts.default], ids=str)
def test_pieces_that_lie_in_their_operand_stay(split: Any) -> None:
    """The gates of a recurrent cell are cut by an op that returns views and does not say so; anybody's op may."""
    g = SmallGraph((2, 4))
    made = g.op(ATEN.neg.default, g.input("x"))
    pieces = g.op(split, made, 2)
    first = g.op(ATEN.sigmoid.default, g.op(operator.getitem, pieces, 0))  # the whole is read behind it
    whole = g.op(ATEN.exp.default, made)  # a piece is read behind it
    second = g.op(ATEN.sin.default, g.op(operator.getitem, pieces, 1))
    assert not {"aten.sigmoid_.default", "aten.exp_.default"} & set(targets(g.joint(first, whole, second)))


@pytest.mark.parametrize("how", ["input", "view", "output", "read behind", "view read behind", "type"])
def test_what_somebody_else_may_read_stays(how: str) -> None:
    """Inputs, views, outputs, what is read behind, and results of another dtype."""
    g = SmallGraph()
    x = g.input("x")
    made = g.op(ATEN.neg.default, x)
    seen = g.op(ATEN.slice.Tensor, made, 0, 0, 4)
    operand = {"input": x, "view": g.op(ATEN.expand.default, x, [4])}.get(how, made)
    end = g.op(ATEN.exp.default, operand)
    ends = [end]
    if "behind" in how:
        ends.append(g.op(ATEN.sin.default, seen if "view" in how else made))
    if how == "output":
        ends.append(made)
    if how == "type":
        end.meta["val"] = torch.empty(4, dtype=torch.float64, device="meta")
    assert "aten.exp_.default" not in targets(g.joint(*ends))


def test_what_is_under_way_stays() -> None:
    """A gather reads its operand until the wait; an op in between may not write there, one behind it may."""
    for late in (False, True):
        g = SmallGraph()
        made = g.op(ATEN.neg.default, g.input("x"))
        call = g.op(C10D.all_gather_into_tensor.default, made, 2, "axis:0", arc="all_gather", origin="made", reason="")
        call.meta["val"] = torch.empty(8, device="meta")

        def wait(g: SmallGraph = g, call: fx.Node = call) -> fx.Node:
            node = g.op(C10D.wait_tensor.default, call)
            node.meta["val"] = call.meta["val"]
            return node

        if late:
            ends = [wait(), g.op(ATEN.exp.default, made)]
        else:
            ends = [g.op(ATEN.exp.default, made), wait()]
        assert ("aten.exp_.default" in targets(g.joint(*ends))) == late


def test_a_dim_of_one_needs_the_layout() -> None:
    """A piece of size 1 here may be of size 0 elsewhere, where the operand is whole: only one layout makes sure."""
    for layouts, written in ((((0,), (0,)), True), (((0,), (-1,)), False), ((None, None), False)):
        g = SmallGraph((1,))
        made = g.op(ATEN.neg.default, g.input("x"))
        end = g.op(ATEN.add.Tensor, made, g.input("y"))
        for node, layout in zip((made, end), layouts):
            if layout is not None:
                node.meta["layout"] = layout
        assert ("aten.add_.Tensor" in targets(g.joint(end))) == written


def test_results_of_one_op_lie_apart() -> None:
    """A result that was taken out of several is fresh; the same one taken out twice is one memory."""
    g = SmallGraph()
    x = g.input("x")
    both = g.op(ATEN.aminmax.default, x)
    first, second = g.op(operator.getitem, both, 0), g.op(operator.getitem, both, 1)
    again = g.op(operator.getitem, both, 1)
    one, other = g.op(ATEN.exp.default, first), g.op(ATEN.exp.default, second)
    found = targets(g.joint(one, other, g.op(ATEN.neg.default, again)))
    assert found.count("aten.exp_.default") == 1


def test_a_view_of_several_shares_memory() -> None:
    """The parts of a split lie in its operand."""
    g = SmallGraph()
    made = g.op(ATEN.neg.default, g.input("x"))
    parts = g.op(ATEN.split.Tensor, made, 4)
    part = g.op(operator.getitem, parts, 0)
    end = g.op(ATEN.exp.default, made)
    assert "aten.exp_.default" not in targets(g.joint(end, g.op(ATEN.neg.default, part)))


def test_gradients_of_activations() -> None:
    """The backward of an activation writes over the gradient that comes in; other numbers stay the same."""

    def graph(g: Tensor, x: Tensor) -> Tensor:
        return ATEN.gelu_backward.default(ATEN.neg.default(g), x)  # type: ignore[no-any-return]

    module = fx.symbolic_trace(graph)
    for node in module.graph.nodes:
        node.meta.update(val=torch.empty(5, device="meta"), phase="backward")
    one, other = torch.randn(2, 5)
    before = module(one, other)
    apply_edits([module.graph], write_in_place(module, SETTING))
    module.recompile()
    assert "grad_input" in module.code
    assert torch.equal(module(one, other), before)


def test_what_was_saved() -> None:
    """A backward writes into what the forward left, and says so; a segment of a step in micro-batches does not."""
    for outputs, written in (((Output("output", "[0]", "y", 0),), True), ((), False)):
        g = SmallGraph()
        made = g.op(ATEN.neg.default, g.input("x"))
        end = g.op(ATEN.exp.default, made)
        end.meta["phase"] = "backward"
        joint = g.joint(end)
        apply_edits([joint.graph], write_in_place(joint, Setting(Mesh((2,)), (), outputs)))
        assert (str(end.target) == "aten.exp_.default") == written
    g = SmallGraph()
    saved, other = g.input("saved"), g.input("other")
    assert written_arguments(g.joint(g.op(ATEN.add_.Tensor, saved, other))) == (0,)
