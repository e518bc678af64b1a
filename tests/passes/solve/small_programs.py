"""Programs of a few ops, drawn at random, with their rules on the nodes: what the oracle can still enumerate."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import fx
from torch.utils import _pytree as pytree

import autopar.passes.ops  # noqa: F401
from autopar.passes.program import Input, Output, Program
from autopar.passes.rules.rule import Factor, Rule

ATEN: Any = torch.ops.aten
CONTRACT: Any = torch.ops.autopar.contract.default


class Builder:
    """Adds nodes one by one; the first ``num_forward`` ops are the forward."""

    def __init__(self, num_forward: int) -> None:
        self.graph = fx.Graph()
        self.num_forward, self.count = num_forward, 0

    def placeholder(self, name: str, shape: tuple[int, ...]) -> fx.Node:
        """Add a placeholder of the forward."""
        node = self.graph.placeholder(name)
        node.meta.update(val=torch.empty(shape, device="meta"), phase="forward", module="", source="")
        return node

    def op(self, target: Any, args: tuple[Any, ...], shape: tuple[int, ...], rule: Rule) -> fx.Node:
        """Add an op with its rule."""
        node = self.graph.call_function(target, args)
        phase = "forward" if self.count < self.num_forward else "backward"
        layer = f"layer.{self.count // 2}"
        self.count += 1
        value = torch.empty(shape, device="meta")
        node.meta.update(val=value, phase=phase, module=layer, source="", rule=rule)
        return node

    def relu(self, x: fx.Node) -> fx.Node:
        """Add a pointwise op."""
        shape = tuple(x.meta["val"].shape)
        dims = tuple(f"d{i}" for i in range(len(shape)))
        return self.op(ATEN.relu.default, (x,), shape, Rule(_factors(shape), (dims,), (dims,)))

    def add(self, x: fx.Node, y: fx.Node) -> fx.Node:
        """Add a sum of two tensors, through which partial sums pass."""
        shape = tuple(x.meta["val"].shape)
        dims = tuple(f"d{i}" for i in range(len(shape)))
        return self.op(ATEN.add.Tensor, (x, y), shape, Rule(_factors(shape), (dims, dims), (dims,), linear=((0, 1),)))

    def product(self, a: fx.Node, b: fx.Node, equation: str) -> fx.Node:
        """Add a product of two matrices."""
        left, right, out = equation.replace("->", ",").split(",")
        sizes = dict(zip(left, a.meta["val"].shape)) | dict(zip(right, b.meta["val"].shape))
        factors = tuple(Factor(c, n, "parallel" if c in out else "sum") for c, n in sizes.items())
        flops = 2.0
        for size in sizes.values():
            flops *= size
        rule = Rule(factors, (tuple(left), tuple(right)), (tuple(out),), flops=flops)
        return self.op(CONTRACT, (a, b, equation), tuple(sizes[c] for c in out), rule)

    def program(self, inputs: tuple[Input, ...], outputs: tuple[Output, ...]) -> Program:
        """Return the finished program."""
        self.graph.output(tuple(self._node(output.node) for output in outputs))
        leaf = pytree.tree_flatten(((0,), {}))[1]
        module = fx.GraphModule(torch.nn.Module(), self.graph)
        return Program(module, inputs, outputs, leaf, pytree.tree_flatten(0)[1])

    def _node(self, name: str | None) -> fx.Node:
        return next(node for node in self.graph.nodes if node.name == name)


def _factors(shape: tuple[int, ...]) -> tuple[Factor, ...]:
    return tuple(Factor(f"d{i}", n) for i, n in enumerate(shape))


@st.composite
def small_programs(draw: st.DrawFn, ops: int = 3) -> Program:
    """Draw a program: a weight, an input, ``ops`` ops (the last may be the backward), a gradient or none."""
    side = draw(st.sampled_from([4, 6, 256, 1024]))
    build = Builder(draw(st.integers(1, ops)))
    w, x = build.placeholder("w", (side, side)), build.placeholder("x", (side, side))
    made = [x]
    for _ in range(ops):
        kind = draw(st.sampled_from(["relu", "add", "product"]))
        first = made[draw(st.integers(0, len(made) - 1))]
        if kind == "relu":
            made.append(build.relu(first))
        elif kind == "add":
            made.append(build.add(first, made[draw(st.integers(0, len(made) - 1))]))
        else:
            equation = draw(st.sampled_from(["ab,cb->ac", "ab,bc->ac"]))
            made.append(build.product(first, w, equation))
    last = made[-1]
    inputs = (Input("w", "parameter", "w", requires_grad=True), Input("x", "input", "args[0]", 0))
    if last.meta["phase"] == "backward":
        return build.program(inputs, (Output("gradient", "w", last.name, of="w"),))
    return build.program(inputs, (Output("output", "[0]", last.name, 0),))
