"""Small lowered joint graphs, written by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.passes.split_phases import GraphOnly

C10D: Any = torch.ops._c10d_functional


class SmallGraph:
    """A forward on tensors of one shape, op by op; every value is named as it is made."""

    def __init__(self, shape: tuple[int, ...] = (4,)) -> None:
        self.graph = fx.Graph()
        self.value = torch.empty(shape, device="meta")

    def input(self, name: str) -> fx.Node:
        """Add a placeholder."""
        node = self.graph.placeholder(name)
        node.meta.update(val=self.value, phase="forward", module="", source="")
        return node

    def op(self, target: Any, *args: Any, name: str | None = None, **meta: Any) -> fx.Node:
        """Add an op."""
        node = self.graph.create_node("call_function", target, args, name=name)
        node.meta.update(val=self.value, phase="forward", module="", source="", **meta)
        return node

    def all_reduce(self, operand: fx.Node, name: str, axis: int = 0) -> fx.Node:
        """Add a sum over an axis, and return what waits for it."""
        arc = {"arc": "all_reduce", "origin": operand.name, "reason": "summed"}
        call = self.op(C10D.all_reduce.default, operand, "sum", f"axis:{axis}", name=name, **arc)
        return self.op(C10D.wait_tensor.default, call, **arc, tensor=operand.name, layout=(-1,))

    def joint(self, *ends: fx.Node) -> fx.GraphModule:
        """Return the graph with its outputs."""
        self.graph.output(tuple(ends))
        return GraphOnly(torch.nn.Module(), self.graph)
