"""Compiled runs of ops between collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autopar.errors import LoweringError
from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.collective_calls import WAIT, is_collective
from autopar.passes.lower import lower
from autopar.passes.program import touches_generator
from autopar.runtime import compile_segments as module_under_test
from autopar.runtime.compile_segments import compile_segments
from autopar.runtime.measure_memory import stand_alone
from tests import models
from tests.passes.improve.small_graph import SmallGraph
from tests.strategies.plans import seeded_plan


def halves(name: str, **options: Any) -> fx.GraphModule:
    """Return the forward of a model on the first of two ranks."""
    model, args, kwargs = getattr(models, name)(**options)
    program = annotate(capture(model, args, kwargs))
    return lower(program, seeded_plan(program, Mesh((2,)), 5), (0,)).forward


def feeds(half: fx.GraphModule) -> list[Tensor]:
    """Return values for the placeholders."""
    torch.manual_seed(0)
    forms = [node.meta["val"] for node in half.graph.nodes if node.op == "placeholder"]
    return [torch.randn(v.shape) if v.dtype.is_floating_point else torch.zeros(v.shape, dtype=v.dtype) for v in forms]


def results(half: fx.GraphModule, values: list[Tensor]) -> list[Any]:
    """Run a half without other ranks."""
    torch.manual_seed(1)
    with torch.no_grad():
        return list(stand_alone(half)(list(values)))


@pytest.fixture
def compiled_runs(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """Let runs be interpreted in place of being compiled; return them as they come."""
    seen: list[fx.GraphModule] = []

    def compile_graph(module: fx.GraphModule, operands: list[Tensor]) -> fx.GraphModule:
        seen.append(module)
        return module

    monkeypatch.setattr(module_under_test, "compile_graph", compile_graph)
    return seen


def test_the_same_ops_run_in_runs(compiled_runs: list[fx.GraphModule]) -> None:
    """The same bits come out, collectives and random ops stay in their order."""
    half = halves("mlp", dropout=0.5)
    cut = compile_segments(half)

    def outside(graph: fx.Graph) -> list[str]:
        return [n.name for n in graph.nodes if is_collective(n) or n.target is WAIT or touches_generator(n)]

    assert outside(cut.graph) == outside(half.graph) != []
    values = feeds(half)
    for one, other in zip(results(half, values), results(cut, values), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
    assert compiled_runs


def test_equal_layers_are_compiled_once(compiled_runs: list[fx.GraphModule]) -> None:
    """Two layers between sums are one piece of code; a third with another number in it is another."""
    g = SmallGraph()
    value = g.input("x")
    for layer, factor in enumerate((2.0, 2.0, 3.0)):
        value = g.op(torch.ops.aten.mul.Tensor, g.op(torch.ops.aten.exp.default, value), factor)
        value = g.all_reduce(value, f"call_{layer}")
    results(compile_segments(g.joint(value)), [torch.zeros(4)])
    assert len(compiled_runs) == 2


def test_operands_in_another_form_are_compiled_for_anew(compiled_runs: list[fx.GraphModule]) -> None:
    """Compiled code holds for its strides: a transposed input does not run through it."""
    half = halves("mlp")
    cut = stand_alone(compile_segments(half))
    values = feeds(half)
    with torch.no_grad():
        cut(list(values))
        first = len(compiled_runs)
        cut(list(values))
        assert len(compiled_runs) == first
        cut([v.t().contiguous().t() if v.dim() == 2 else v for v in values])
    assert len(compiled_runs) > first


def test_inductor_computes_the_same() -> None:
    """The real compiler, on two ops, within rounding."""
    g = SmallGraph((3, 5))
    half = g.joint(g.all_reduce(g.op(torch.ops.aten.tanh.default, g.op(torch.ops.aten.exp.default, g.input("x"))), "c"))
    values = [torch.randn(3, 5)]
    for one, other in zip(results(half, values), results(compile_segments(half), values), strict=True):
        torch.testing.assert_close(one, other)


def test_a_compiler_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what it was, and how to go on."""

    def compile_graph(module: fx.GraphModule, operands: list[Tensor]) -> None:
        raise RuntimeError("no g++")

    monkeypatch.setattr(module_under_test, "compile_graph", compile_graph)
    half = halves("mlp")
    with pytest.raises(LoweringError, match=r"could not compile a run of .*no g\+\+; .*leave compile= out"):
        results(compile_segments(half), feeds(half))
