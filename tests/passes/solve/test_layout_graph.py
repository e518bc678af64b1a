"""The graph of layouts is what the arcs of ``redistribution`` say, at the price of ``cost``."""

from __future__ import annotations

import math

import pytest

from autopar.mesh import Mesh
from autopar.passes.cost.collectives import collective_seconds
from autopar.passes.insert_collectives import arc_bytes
from autopar.passes.redistribution import arcs_from, route
from autopar.passes.solve.layout_graph import LayoutGraphs, Prices, decode, encode
from autopar.placement import PARTIAL_SUM

CASES = [((6, 5), (2,)), ((6, 5), (2, 2)), ((7, 4, 3), (2, 3)), ((8, 16), (2, 2, 2)), ((), (2,)), ((1, 4), (4, 1))]


@pytest.mark.parametrize(("shape", "sizes"), CASES)
def test_arcs_and_prices_are_those_of_single_collectives(shape: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """Every arc of every layout is there once, handed bytes included, and no other; ways are the cheapest routes."""
    mesh = Mesh(sizes, device="h100")
    prices = Prices.of(mesh)
    graph = LayoutGraphs(prices).graph(shape, 2, (PARTIAL_SUM,))
    layouts = [decode(int(value), len(sizes)) for value in graph.layouts]
    assert [encode(layout) for layout in layouts] == graph.layouts.tolist()

    def price(arc) -> float:
        handed = float(arc_bytes(shape, 2, arc, sizes))
        ends = arc.source[arc.axis], arc.target[arc.axis]
        link = prices.links[arc.axis]
        return float(collective_seconds(arc.kind, sizes[arc.axis], handed, *ends, link, prices.device))

    expected = {(arc.source, arc.target): price(arc) for layout in layouts for arc in arcs_from(layout, shape, sizes)}
    found = {(layouts[a], layouts[b]): seconds for (a, b), seconds in graph.seconds_between.items()}
    assert found == expected
    for i, source in enumerate(layouts[:12]):
        for j, target in enumerate(layouts):
            if math.isfinite(graph.dist_s[i, j]):
                way = sum(price(arc) for arc in route(shape, sizes, [source], target, price))
                assert math.isclose(way, graph.dist_s[i, j], rel_tol=1e-9, abs_tol=1e-15)
