"""Arcs as nodes: whatever a tensor's shape and layout, an arc moves it and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import fx

from autopar.mesh import Mesh
from autopar.passes.insert_collectives import COLLECTIVES, arc_bytes, insert_arc
from autopar.passes.redistribution import Arc, arc_between, arcs_from
from autopar.placement import PARTIAL, PARTIAL_NAMES, Layout, is_partial, local_shape
from autopar.runtime.simulate import Moved, assemble, run_lockstep, shard
from tests.strategies.plans import legal_layouts, meshes


def arc_graph(arc: Arc, shape: tuple[int, ...], dtype: torch.dtype, mesh: Mesh, rank: int) -> fx.GraphModule:
    """Return a graph that moves one tensor along ``arc``; every node's stated shape is kept in ``val``."""
    graph = fx.Graph()
    coordinate = mesh.coordinate(rank)
    start = graph.placeholder("x")

    def emit(target: Any, args: tuple[Any, ...], local: tuple[int, ...], kind: torch.dtype) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = torch.empty(local, dtype=kind, device="meta")
        return node

    graph.output(insert_arc(arc, start, shape, dtype, mesh.sizes, coordinate, emit))
    return fx.GraphModule(torch.nn.Module(), graph)


def pieces_of(whole: torch.Tensor, layout: Layout, mesh: Mesh) -> list[torch.Tensor]:
    """Return one piece a rank; partial ones are drawn so that they reduce to ``whole``."""
    pieces = [whole.clone() for _ in mesh.coordinates()]
    for axis, code in enumerate(layout):
        if is_partial(code):
            for rank, coordinate in enumerate(mesh.coordinates()):
                if coordinate[axis] == 0:
                    members = mesh.group(coordinate, axis)
                    for member, part in zip(members, _parts(pieces[rank], len(members), PARTIAL_NAMES[code])):
                        pieces[member] = part
    return [shard(piece, layout, mesh, c) for piece, c in zip(pieces, mesh.coordinates())]


def _parts(value: torch.Tensor, count: int, op: str) -> list[torch.Tensor]:
    if op == "sum":
        noise = [torch.randint(-50, 50, value.shape).to(value.dtype) for _ in range(count - 1)]
        return [value - sum(noise, torch.zeros_like(value)), *noise]
    sign = -1 if op == "max" else 1
    lesser = [value + sign * torch.randint(0, 9, value.shape).to(value.dtype) for _ in range(count)]
    owner = torch.randint(0, count, value.shape)
    return [torch.where(owner == i, value, part) for i, part in enumerate(lesser)]


@st.composite
def moves(draw: st.DrawFn) -> tuple[Mesh, tuple[int, ...], Layout, Arc]:
    """Draw a mesh, a global shape, a legal layout and an arc that leaves it."""
    mesh = draw(meshes())
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    kinds = (PARTIAL["sum"], PARTIAL["max"], PARTIAL["min"])
    layouts = [n for n in legal_layouts(shape, mesh, kinds) if arcs_from(n, shape, mesh.sizes)]
    if not layouts:
        shape = (8, *shape[1:])
        layouts = [n for n in legal_layouts(shape, mesh, kinds) if arcs_from(n, shape, mesh.sizes)]
    layout = draw(st.sampled_from(layouts))
    return mesh, shape, layout, draw(st.sampled_from(arcs_from(layout, shape, mesh.sizes)))


@given(moves(), st.sampled_from([torch.float64, torch.int64]), st.integers(0, 99))
def test_an_arc_moves_a_tensor_and_changes_nothing(
    move: tuple[Mesh, tuple[int, ...], Layout, Arc], dtype: torch.dtype, seed: int
) -> None:
    """Reassembled after the arc, the tensor is the one before it; stated shapes and bytes are those that run."""
    mesh, shape, layout, arc = move
    torch.manual_seed(seed)
    whole = torch.randint(-99, 99, shape).to(dtype)
    graphs = [arc_graph(arc, shape, dtype, mesh, rank) for rank in range(mesh.num_ranks)]
    moved: list[Moved] = []

    def stated(node: fx.Node, values: list[Any]) -> None:
        if node.op == "call_function":
            for graph, value in zip(graphs, values):
                twin = next(n for n in graph.graph.nodes if n.name == node.name)
                assert twin.meta["val"].shape == value.shape

    pieces = [[piece] for piece in pieces_of(whole, layout, mesh)]
    results = run_lockstep(graphs, pieces, mesh, moved=moved, watch=stated)
    assert torch.equal(assemble(results, arc.target, shape, mesh), whole)
    assert all(result.is_contiguous() for result in results)
    assert [m.kind for m in moved] == ([] if arc.kind == "slice" else [arc.kind])
    assert sum(m.bytes for m in moved) == arc_bytes(shape, whole.element_size(), arc, mesh.sizes)


def test_an_even_gather_of_dim_zero_is_one_collective() -> None:
    """Nothing is padded, moved or trimmed where nothing needs to be."""
    arc = arc_between((0,), (-1,))
    assert arc is not None
    graph = arc_graph(arc, (8, 3), torch.float32, Mesh((4,)), 1)
    names = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    assert names == [
        "aten.contiguous.default",
        "_c10d_functional.all_gather_into_tensor.default",
        "_c10d_functional.wait_tensor.default",
    ]


def test_ranks_emit_the_same_ops_when_pieces_are_uneven() -> None:
    """Five over two and then two: the groups pad differently, the node sequence is one."""
    mesh = Mesh((2, 2))
    arc = arc_between((0, 0), (0, -1))
    assert arc is not None
    sequences = {
        tuple(str(n.target) for n in arc_graph(arc, (5,), torch.float32, mesh, rank).graph.nodes) for rank in range(4)
    }
    assert len(sequences) == 1
    assert local_shape((5,), (0, 0), mesh.sizes, (1, 1)) == (1,)


@given(moves())
def test_complex_numbers_travel_as_pairs_of_real_ones(move: tuple[Mesh, tuple[int, ...], Layout, Arc]) -> None:
    """No backend sees complex numbers, and what is only marked as conjugated is conjugated before it leaves."""
    mesh, shape, layout, arc = move
    assume(all(code >= PARTIAL["sum"] for code in layout))
    whole = torch.complex(*torch.randint(-99, 99, (2, *shape)).double())
    graphs = [arc_graph(arc, shape, whole.dtype, mesh, rank) for rank in range(mesh.num_ranks)]
    sent: list[torch.dtype] = []

    def see(node: fx.Node, values: list[Any]) -> None:
        if node.target in COLLECTIVES:
            sent.append(values[0].dtype)

    pieces = [[piece.conj_physical().conj()] for piece in pieces_of(whole, layout, mesh)]
    moved: list[Moved] = []
    results = run_lockstep(graphs, pieces, mesh, moved=moved, watch=see)
    assert torch.equal(assemble(results, arc.target, shape, mesh), whole)
    assert set(sent) <= {torch.float64}
    assert sum(m.bytes for m in moved) == arc_bytes(shape, whole.element_size(), arc, mesh.sizes)


@pytest.mark.parametrize("op", ["max", "min"])
def test_bool_partials_reduce(op: str) -> None:
    """A partial truth value is reduced as a byte and comes back as bool."""
    mesh = Mesh((3,))
    arc = arc_between((PARTIAL[op],), (-1,))
    assert arc is not None
    graphs = [arc_graph(arc, (2,), torch.bool, mesh, rank) for rank in range(3)]
    pieces = [[torch.tensor([rank == 0, True])] for rank in range(3)]
    results = run_lockstep(graphs, pieces, mesh)
    assert results[0].dtype == torch.bool
    assert results[0].tolist() == [op == "max", True]
    assert any(node.target in COLLECTIVES for node in graphs[0].graph.nodes)
