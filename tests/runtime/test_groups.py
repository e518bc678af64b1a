"""Binding a lowered graph to this process: group names, devices, constants."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn

from autopar.mesh import Mesh
from autopar.runtime import groups as module
from autopar.runtime.compile import _left_out
from autopar.runtime.groups import MeshGroups, bind_groups, joint_ranks, names_of

GRID = Mesh((2, 3, 2))


class Grid:
    """Stands in for torch's mesh of several ranks, as one rank sees it."""

    ndim = 3
    mesh = torch.arange(100, 112).reshape(GRID.sizes)

    def __init__(self, rank: int) -> None:
        self.place = GRID.coordinate(rank)

    def get_coordinate(self) -> list[int]:
        """Return where the rank is."""
        return list(self.place)

    def get_group(self, axis: int) -> Any:
        """Return something with the name of the group along an axis."""
        return SimpleNamespace(group_name=f"along {axis}")

    def size(self, axis: int) -> int:
        """Return the ranks along an axis."""
        return GRID.sizes[axis]


@pytest.mark.parametrize("axes", [some for count in (1, 2, 3) for some in combinations(range(3), count)])
def test_ranks_along_several_axes(axes: tuple[int, ...]) -> None:
    """Those whose places differ along these axes at most, for every rank and every set, neighbours or not."""
    for rank in range(12):
        here = GRID.coordinate(rank)
        alike = [
            other
            for other in range(12)
            if all(axis in axes or GRID.coordinate(other)[axis] == here[axis] for axis in range(3))
        ]
        assert joint_ranks(Grid(rank), axes) == tuple(100 + other for other in alike)  # type: ignore[arg-type]


def test_a_part_of_a_world_bound_to_devices_joins_no_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """To make a group all of such a world must come; the graph then has none on several axes."""
    made: list[tuple[int, ...]] = []

    def joint(_: Any, axes: tuple[int, ...]) -> Any:
        made.append(axes)
        return SimpleNamespace(group_name=f"along {axes}")

    monkeypatch.setattr(module, "_joint_group", joint)
    for bound, size, joined in ((None, 16, True), ("cuda:0", 12, True), ("cuda:0", 16, False)):
        made.clear()
        world = SimpleNamespace(bound_device_id=bound, size=lambda size=size: size)
        monkeypatch.setattr(module.dist, "group", SimpleNamespace(WORLD=world))
        names = names_of(Grid(0), 12)  # type: ignore[arg-type]
        assert made == ([(0, 1), (0, 2), (1, 2), (0, 1, 2)] if joined else [])
        assert len(names) == 3 + len(made)
        rest: Any = dict.fromkeys(("device_mesh", "device", "ranks", "control", "board", "boards"))
        groups = MeshGroups(mesh=GRID, coordinate=(0, 0, 0), names=names, **rest)
        assert ("join_axes" in _left_out(groups, compiled=True)) != joined
        assert "reduce_in_place" in _left_out(groups, compiled=True)
        assert "reduce_in_place" not in _left_out(groups, compiled=False)


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
