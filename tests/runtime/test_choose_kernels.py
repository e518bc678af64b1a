"""Kernels that are chosen compute what the ops of the graph compute, and are chosen only where they may be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from autopar.runtime.choose_kernels import choose_kernels

aten = torch.ops.aten


def graph_of(function: Callable[..., object], *inputs: Tensor) -> fx.GraphModule:
    """Return a function of ATen ops as a graph with shapes."""
    module = fx.symbolic_trace(function)
    FakeTensorProp(module).propagate(*inputs)
    return module


def ops_of(module: fx.GraphModule) -> list[str]:
    """Return what a graph calls."""
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def chosen(function: Callable[..., object], *inputs: Tensor) -> list[str]:
    """Return what is called after the choice; the results are those from before."""
    module = graph_of(function, *inputs)
    before = module(*inputs)
    choose_kernels(module.graph)
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(*inputs), before, rtol=1e-12, atol=1e-12)
    return ops_of(module)


def random(*shape: int) -> Tensor:
    """Return made-up numbers."""
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("bias_first", [False, True])
def test_bias(bias_first: bool) -> None:
    """A product and its bias are one kernel."""

    def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        product = aten.linear.default(x, w)
        return aten.add.Tensor(b, product) if bias_first else aten.add.Tensor(product, b)

    assert chosen(layer, random(2, 3, 4), random(5, 4), random(5)) == ["aten.linear.default"]


def test_no_bias() -> None:
    """A residual, a bias of one element, a scaled bias, and a product that others read stay as they are."""

    def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return aten.add.Tensor(aten.linear.default(x, w), b)

    def scaled(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return aten.add.Tensor(aten.linear.default(x, w), b, alpha=2)

    def read(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        product = aten.linear.default(x, w)
        return product, aten.add.Tensor(product, b)

    x, w = random(2, 3, 4), random(5, 4)
    for function, bias in ((layer, random(2, 3, 5)), (layer, random(1)), (scaled, random(5)), (read, random(5))):
        assert chosen(function, x, w, bias)[-1] == "aten.add.Tensor"


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("abd,abc->dc", ((2, 3, 4), (2, 3, 5))),
        ("abd,abc->cd", ((2, 3, 4), (2, 3, 5))),
        ("xd,xc->dc", ((3, 4), (3, 5))),
    ],
)
def test_weight_gradient(equation: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    """A contraction over all leading dims is a product of matrices, also of operands that are not contiguous."""

    def contract(g: Tensor, x: Tensor) -> Tensor:
        return aten.einsum.default(equation, [g, x])

    g, x = (random(*shape) for shape in shapes)
    odd = random(*reversed(shapes[0])).permute(*reversed(range(g.dim())))
    for first in (g, odd):
        assert chosen(contract, first, x)[-1] == "aten.mm.default"


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("abd,bac->dc", ((2, 3, 4), (3, 2, 5))),
        ("abd,abc->adc", ((2, 3, 4), (2, 3, 5))),
        ("aa,ac->ac", ((3, 3), (3, 5))),
        ("d,c->dc", ((4,), (5,))),
    ],
)
def test_other_contractions(equation: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Any other contraction stays an einsum."""

    def contract(g: Tensor, x: Tensor) -> Tensor:
        return aten.einsum.default(equation, [g, x])

    assert chosen(contract, *(random(*shape) for shape in shapes)) == ["aten.einsum.default"]


@pytest.mark.parametrize(
    ("count", "shown", "eager", "direct"),
    [(20, False, True, True), (40, False, True, False), (20, True, True, False), (20, False, False, False)],
)
def test_statistics_of_all_there_is(count: int, shown: bool, eager: bool, direct: bool) -> None:
    """They need no moments; those of a part do, what reads the moments itself does, and a compiler sees no numbers."""

    def read(x: Tensor) -> list[Tensor]:
        moments = torch.ops.autopar.moments.default(x)
        mean, variance, scale = torch.ops.autopar.statistics.default(moments, count, 1e-5, torch.float64)
        return [mean, variance, scale, *([moments] if shown else [])]

    x = random(4, 3, 5)
    module = graph_of(read, x)
    before = module(x)
    choose_kernels(module.graph, eager=eager)
    module.recompile()
    torch.testing.assert_close(module(x), before, rtol=1e-12, atol=1e-12)
    assert ("autopar.moments.default" not in ops_of(module)) is direct
