"""Runs the local ops of a lowered graph by the kernels that eager PyTorch runs for the same layers.

The rules see a linear layer as a product and a sum, and the gradient of a weight as one contraction, because their
factors are cut that way. Once lowered, nothing is cut any more, and one kernel does what two did:

| in the graph | runs as |
| --- | --- |
| ``add(linear(x, w), b)`` | ``linear(x, w, b)``: the sum is not a pass over memory of its own |
| ``einsum("abd,abc->dc", g, x)`` | ``mm`` of two matrices, without reading the text of the einsum in every step |
| ``statistics(moments(x), count)`` where all is in ``x`` | its statistics, without moments to be added to others |

Sums run in another order than in the lowered graph: results differ by rounding, as those of any two kernels do.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar.passes.ops.norm_kernels import statistic_dtype, statistics_of

aten = torch.ops.aten

_MOMENTS: Any = torch.ops.autopar.moments.default
_STATISTICS: Any = torch.ops.autopar.statistics.default

_SUMS = (aten.add.Tensor, aten.add_.Tensor, aten.add.out)
"""Sums of two tensors, into new memory or into that of one of them."""


def choose_kernels(graph: fx.Graph, *, eager: bool = True) -> None:
    """Change a lowered graph in place. Safe where ``val`` of the nodes is right: shapes are read off it.

    Args:
        graph: with groups bound.
        eager: it runs as it is; a compiler could not look into kernels in Python that look at numbers.
    """
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _SUMS:
            _take_in_bias(graph, node)
        elif node.target is aten.einsum.default:
            _multiply_matrices(graph, node)
        elif node.target is _STATISTICS and eager:
            _take_statistics(graph, node)


def _take_in_bias(graph: fx.Graph, node: fx.Node) -> None:
    """Replace a sum of a product and a bias by a linear layer with a bias, if nobody else reads the product."""
    if node.kwargs.keys() - {"out"} or len(node.args) != 2 or not all(isinstance(arg, fx.Node) for arg in node.args):
        return
    for product, bias in (node.args, node.args[::-1]):
        assert isinstance(product, fx.Node) and isinstance(bias, fx.Node)
        if product.target is aten.linear.default and len(product.args) == 2 and list(product.users) == [node]:
            whole, added = product.meta["val"], bias.meta.get("val")
            if not isinstance(added, torch.Tensor):
                continue
            if added.shape == whole.shape[-1:] and added.dtype == whole.dtype and whole.dim() > 1:
                with graph.inserting_before(node):
                    made = graph.call_function(aten.linear.default, (*product.args, bias))
                _replace(graph, node, made)
                graph.erase_node(product)
                return


def _take_statistics(graph: fx.Graph, node: fx.Node) -> None:
    """Replace the statistics of the moments of a tensor by its own, if nothing was added to the moments."""
    moments, count, eps, dtype = node.args
    if not isinstance(moments, fx.Node) or moments.target is not _MOMENTS or list(moments.users) != [node]:
        return
    (x,) = moments.args
    assert isinstance(x, fx.Node)
    whole = x.meta["val"]
    if not whole.numel() or whole.numel() != count * whole.shape[1] or dtype != statistic_dtype(whole.dtype):
        return
    with graph.inserting_before(node):
        made = graph.call_function(statistics_of, (x, eps))
    _replace(graph, node, made)
    graph.erase_node(moments)


def _multiply_matrices(graph: fx.Graph, node: fx.Node) -> None:
    """Replace an einsum that sums over all dims but the last of both operands by a product of matrices."""
    operands: Any = node.args[1]
    if node.kwargs or len(node.args) != 2 or len(operands) != 2:
        return
    left, _, result = str(node.args[0]).replace(" ", "").partition("->")
    first, _, second = left.partition(",")
    summed = first[:-1]
    letters = summed + first[-1:] + second[-1:]
    if not summed or second[:-1] != summed or len(set(letters)) != len(letters) or not letters.isalpha():
        return
    if result == first[-1] + second[-1]:
        one, other = operands
    elif result == second[-1] + first[-1]:
        other, one = operands
    else:
        return
    shapes = [tuple(operand.meta["val"].shape) for operand in (one, other)]
    rows = math.prod(shapes[0][:-1])
    with graph.inserting_before(node):
        tall, wide = (
            graph.call_function(aten.reshape.default, (operand, [rows, shape[-1]]))
            for operand, shape in zip((one, other), shapes)
        )
        made = graph.call_function(aten.mm.default, (graph.call_function(aten.t.default, (tall,)), wide))
    _replace(graph, node, made)


def _replace(graph: fx.Graph, node: fx.Node, made: fx.Node) -> None:
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
