"""Cutting a joint graph into its halves."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar.errors import LoweringError
from autopar.passes.program import Input, Output
from autopar.passes.split_phases import GraphOnly, split_phases
from tests.passes.tiny_program import ATEN

INPUTS = (Input("x", "input", "args[0]", 0, requires_grad=True), Input("t", "tangent", "", 0))
OUTPUTS = (
    Output("output", "", "y", 0),
    Output("output", "[1]", None, 1, constant=3),
    Output("gradient", "args[0]", "g", of="x"),
)


def joint(*, late_output: bool = False, late_operand: bool = False) -> fx.GraphModule:
    """Return ``y = tanh(x)`` with its gradient, optionally with a fault."""
    graph = fx.Graph()
    x, t = graph.placeholder("x"), graph.placeholder("t")
    y = graph.call_function(ATEN.tanh.default, (t if late_operand else x,))
    y.meta["phase"] = "forward"
    g = graph.call_function(ATEN.tanh_backward.default, (t, y))
    g.meta["phase"] = "backward"
    graph.output((g if late_output else y, 3, g))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_the_halves_compute_what_the_whole_does() -> None:
    """What the backward reads is handed over; what no node computes is left out."""
    forward, backward, num_saved = split_phases(joint(), INPUTS, OUTPUTS)
    x, t = torch.randn(3), torch.randn(3)
    y, *saved = forward(x)
    assert backward is not None and num_saved == len(saved) == 1
    (gradient,) = backward(*saved, t)
    torch.testing.assert_close(y, x.tanh())
    torch.testing.assert_close(gradient, t * (1 - x.tanh() ** 2))


def test_without_gradients_there_is_no_backward() -> None:
    """An inference program is its forward."""
    forward, backward, num_saved = split_phases(joint(), INPUTS, OUTPUTS[:2])
    assert backward is None and num_saved == 0
    assert len(forward(torch.randn(2))) == 1


def test_graphs_alone_can_be_read() -> None:
    """Without code the halves still hold their graphs."""
    forward, _, _ = split_phases(joint(), INPUTS, OUTPUTS, callable_halves=False)
    assert isinstance(forward, GraphOnly)
    assert [node.op for node in forward.graph.nodes] == ["placeholder", "call_function", "output"]


def test_faults_of_phases_are_named() -> None:
    """A forward that reads the backward can't be cut off."""
    with pytest.raises(LoweringError, match="forward node tanh_default reads the backward"):
        split_phases(joint(late_operand=True), INPUTS, OUTPUTS)
    with pytest.raises(LoweringError, match="computed in the backward"):
        split_phases(joint(late_output=True), INPUTS, OUTPUTS)
