"""The lock-step simulator: shards come together again, and graphs that would hang are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from autopar.errors import LoweringError, MismatchError
from autopar.mesh import Mesh
from autopar.runtime.simulate import assemble, difference, global_shape, run_lockstep, same, shard
from tests.strategies.plans import legal_layouts, meshes

C10D: Any = torch.ops._c10d_functional


@given(st.data(), meshes(), st.lists(st.integers(1, 9), min_size=0, max_size=3))
def test_shards_assemble(data: st.DataObject, mesh: Mesh, shape: list[int]) -> None:
    """Whatever the layout, the pieces of a tensor make the tensor, and tell its shape."""
    layout = data.draw(st.sampled_from(legal_layouts(shape, mesh)))
    whole = torch.randn(shape)
    pieces = [shard(whole, layout, mesh, c) for c in mesh.coordinates()]
    assert global_shape(pieces, layout, mesh) == tuple(shape)
    assert torch.equal(assemble(pieces, layout, shape, mesh), whole)


def test_replicas_must_agree() -> None:
    """A replicated tensor that differs between ranks is an error with the size of the difference."""
    with pytest.raises(MismatchError, match=r"h in R differs between ranks by 0\.5"):
        assemble([torch.tensor([1.0]), torch.tensor([1.5])], (-1,), (1,), Mesh((2,)), "h")


def test_a_piece_of_the_wrong_shape_is_refused() -> None:
    """Three rows over two ranks are two and one, not one and two."""
    with pytest.raises(MismatchError, match="should be \\(2,\\) on rank 0; its piece is \\(1,\\)"):
        assemble([torch.zeros(1), torch.zeros(2)], (0,), (3,), Mesh((2,)), "h")


def graph_of(target: Any, *args: Any) -> fx.GraphModule:
    """Return a graph of one collective on its input."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(C10D.wait_tensor.default, (graph.call_function(target, (x, *args)),)))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_collectives_along_each_axis() -> None:
    """On a 2 x 2 grid, axis 0 joins ranks 0 and 2, axis 1 ranks 0 and 1."""
    mesh = Mesh((2, 2))
    inputs = [[torch.tensor([float(rank), 10.0 * rank])] for rank in range(4)]

    def run(target: Any, *args: Any) -> list[list[float]]:
        return [out.tolist() for out in run_lockstep([graph_of(target, *args)] * 4, inputs, mesh)]

    assert run(C10D.all_reduce.default, "sum", "axis:0") == [[2, 20], [4, 40], [2, 20], [4, 40]]
    assert run(C10D.all_reduce.default, "max", "axis:1") == [[1, 10], [1, 10], [3, 30], [3, 30]]
    assert run(C10D.all_gather_into_tensor.default, 2, "axis:1")[3] == [2, 20, 3, 30]
    assert run(C10D.reduce_scatter_tensor.default, "sum", 2, "axis:1") == [[1], [10], [5], [50]]
    assert run(C10D.all_to_all_single.default, [1, 1], [1, 1], "axis:1") == [[0, 1], [0, 10], [2, 3], [20, 30]]
    assert run(C10D.all_reduce.default, "sum", "axis:0+1") == [[6, 60]] * 4


def test_what_would_hang_is_refused() -> None:
    """Ranks that run other ops, hand in other shapes or count a group wrongly are an error here, a hang there."""
    mesh = Mesh((2,))
    gather, reduce = C10D.all_gather_into_tensor.default, C10D.all_reduce.default
    x, y = torch.zeros(2), torch.zeros(3)
    with pytest.raises(LoweringError, match="different ops"):
        run_lockstep([graph_of(gather, 2, "axis:0"), graph_of(reduce, "sum", "axis:0")], [[x], [x]], mesh)
    with pytest.raises(LoweringError, match="different shapes"):
        run_lockstep([graph_of(reduce, "sum", "axis:0")] * 2, [[x], [y]], mesh)
    with pytest.raises(LoweringError, match="states 3"):
        run_lockstep([graph_of(gather, 3, "axis:0")] * 2, [[x], [x]], mesh)
    with pytest.raises(LoweringError, match="different groups"):
        graphs = [graph_of(reduce, "sum", "axis:0"), graph_of(reduce, "sum", "axis:1")]
        run_lockstep(graphs, [[x], [x]], Mesh((2, 1)))
    with pytest.raises(LoweringError, match="its group is axis:0\\+1"):
        run_lockstep([graph_of(gather, 4, "axis:0+1")] * 4, [[x]] * 4, Mesh((2, 2)))
    with pytest.raises(LoweringError, match="not contiguous"):
        run_lockstep([graph_of(reduce, "sum", "axis:0")] * 2, [[torch.zeros(2, 3).t()]] * 2, mesh)


def test_ranks_draw_the_same_random_numbers() -> None:
    """Every rank sees the generator in one state, and leaves it as one device would."""
    graph = fx.Graph()
    graph.output(graph.call_function(torch.ops.aten.rand.default, ([3],)))
    module = fx.GraphModule(torch.nn.Module(), graph)
    torch.manual_seed(3)
    first, second = run_lockstep([module] * 2, [[], []], Mesh((2,)))
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(3)) and torch.equal(first, second)
    assert torch.equal(after, torch.rand(1))


def test_same_and_difference() -> None:
    """Copies may differ by rounding, integers may not; one NaN is infinitely far."""
    a = torch.tensor([1.0, 2.0])
    assert same(a, a + 1e-7) and not same(a, a + 1e-3)
    assert not same(torch.tensor([1]), torch.tensor([2]))
    assert difference(a, torch.tensor([float("nan"), 2.0])) == float("inf")
    assert difference(a, a + 1) == 1.0
