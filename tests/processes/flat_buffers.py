"""What the ranks of a pool run: collectives over one flat buffer, and the same ones by one."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from autopar.passes.collective_calls import COALESCED
from autopar.passes.flatten_buckets import flatten_buckets

C10D: Any = torch.ops._c10d_functional
SHAPES = ((4, 3), (2,), (6, 1, 2), (2, 5))


def move(kind: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor], list[str]]:
    """Return what single collectives bring, what they bring over one buffer, and the collectives of that graph."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    operands = [(torch.arange(torch.Size(shape).numel()) + 7 * rank).reshape(shape).to(dtype) for shape in SHAPES]
    operands[0] = operands[0].t().contiguous().t() if kind == "all_reduce" else operands[0]
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    arguments = {"all_reduce": ("sum",), "all_gather": (ranks,), "reduce_scatter": ("sum", ranks)}[kind]
    several = next(op for op in COALESCED if kind in str(op))
    single = COALESCED[several]
    apart = [C10D.wait_tensor(single(operand.contiguous(), *arguments, name)) for operand in operands]
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{index}") for index in range(len(SHAPES))]
    call = graph.call_function(several, (inputs, *arguments, "axis:0"))
    call.meta.update(val=[value.to("meta") for value in apart], members=[("x", ((0, ""),))] * len(SHAPES))
    ends = []
    for index, operand in enumerate(operands):
        inputs[index].meta["val"] = operand.to("meta")
        part = graph.call_function(operator.getitem, (call, index))
        ends.append(graph.call_function(C10D.wait_tensor.default, (part,)))
    graph.output(tuple(ends))
    flatten_buckets(graph)
    for node in graph.nodes:
        node.args = fx.node.map_aggregate(node.args, lambda leaf: name if leaf == "axis:0" else leaf)  # type: ignore[assignment]
    together = fx.GraphModule({}, graph)(*operands)
    calls = [str(node.target) for node in graph.nodes if "_c10d_functional" in str(node.target)]
    return apart, list(together), calls
