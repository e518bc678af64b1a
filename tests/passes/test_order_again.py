"""What is computed again is computed in an order that works, however deep it goes."""

from __future__ import annotations

import operator
import sys

import torch
from torch import fx

from autopar.passes.order_again import order_again


def chain(depth: int) -> fx.Graph:
    """Return a forward in which every op adds the two before it."""
    graph = fx.Graph()
    nodes = [graph.placeholder("a"), graph.placeholder("b")]
    for _ in range(depth):
        nodes.append(graph.call_function(torch.ops.aten.add.Tensor, tuple(nodes[-2:])))
    for node in nodes:
        node.meta.update(val=torch.empty(2, device="meta"), phase="forward")
    return graph


def test_every_op_comes_once_and_after_what_it_reads() -> None:
    """A chain deeper than the interpreter's stack, in which the ways to an op double with every step."""
    nodes = list(chain(2 * sys.getrecursionlimit()).nodes)
    order = order_again(nodes[-1], {node.name for node in nodes[2:]})
    assert order == nodes[2:]


def test_what_is_kept_is_where_the_walk_ends() -> None:
    """Ops that are kept, or were computed again before, are not computed once more; nor what only they read."""
    nodes = list(chain(6).nodes)
    names = {node.name for node in nodes[2:]}
    assert order_again(nodes[-1], names - {nodes[4].name, nodes[5].name}) == nodes[6:]
    assert order_again(nodes[-1], names - {nodes[-1].name}) == []


def test_ops_of_the_backward_are_left_alone() -> None:
    """A name in the plan that stands for an op of the backward calls for nothing."""
    nodes = list(chain(3).nodes)
    nodes[-1].meta["phase"] = "backward"
    assert order_again(nodes[-1], {nodes[-1].name}) == []


def test_the_result_of_an_op_with_several_stands_for_the_op() -> None:
    """Whoever reads one result of an op needs the op."""
    nodes = list((graph := chain(1)).nodes)
    pair = graph.call_function(torch.ops.aten.topk.default, (nodes[-1], 1))
    pair.meta.update(val=(nodes[0].meta["val"],) * 2, phase="forward")
    first = graph.call_function(operator.getitem, (pair, 0))
    first.meta.update(val=nodes[0].meta["val"], phase="forward")
    assert order_again(first, {nodes[2].name, pair.name}) == [nodes[2], pair]
