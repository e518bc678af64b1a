"""The solver prices the bytes that the lowered collectives hand in, for every arc of every tensor."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.mesh import Mesh
from autopar.passes.cost.collectives import collective_seconds
from autopar.passes.insert_collectives import arc_bytes
from autopar.passes.redistribution import arc_between
from autopar.passes.solve.layout_graph import LayoutGraphs, Prices, decode
from autopar.placement import PARTIAL_SUM
from tests.strategies.plans import meshes


@given(meshes(), st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple))
def test_arcs_are_priced_by_the_bytes_they_move(mesh: Mesh, shape: tuple[int, ...]) -> None:
    """Padding of uneven pieces is counted, and an all-to-all hands in one piece for every rank, not more."""
    prices = Prices.of(mesh)
    graph = LayoutGraphs(prices).graph(shape, 4, (PARTIAL_SUM,))
    for source, target, axis, seconds in zip(graph.source, graph.target, graph.axis, graph.seconds, strict=True):
        before, after = (decode(int(graph.layouts[node]), mesh.num_axes) for node in (source, target))
        arc = arc_between(before, after)
        assert arc is not None and arc.axis == axis
        size = float(arc_bytes(shape, 4, arc, mesh.sizes))
        codes = before[axis], after[axis]
        expected = collective_seconds(arc.kind, mesh.sizes[axis], size, *codes, prices.links[axis], prices.device)
        assert seconds == pytest.approx(float(expected), rel=1e-12)
