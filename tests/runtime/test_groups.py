"""Binding a lowered graph to this process: group names, devices, constants."""

from __future__ import annotations

import torch
from torch import fx, nn

from autopar.runtime.groups import bind_groups


def test_bind_groups() -> None:
    """Group strings become names in collectives only, devices and constants move; the original stays as it is."""
    root = nn.Module()
    root.constant = torch.ones(3)
    graph = fx.Graph()
    x = graph.placeholder("x")
    total = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "axis:1"))
    waited = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (total,))
    steps = graph.call_function(torch.ops.aten.arange.default, (3,), {"device": torch.device("cpu")})
    graph.output((waited, steps, graph.get_attr("constant")))
    module = fx.GraphModule(root, graph)
    bound = bind_groups(module, {"axis:0": "first", "axis:1": "second", "axis:0+1": "both"}, torch.device("meta"))
    nodes = list(bound.graph.nodes)
    assert nodes[1].args == (nodes[0], "sum", "second")
    assert nodes[3].kwargs["device"] == torch.device("meta")
    assert bound.constant.is_meta
    assert total.args == (x, "sum", "axis:1")
    assert not module.constant.is_meta
    assert [node.name for node in nodes] == [node.name for node in module.graph.nodes]
