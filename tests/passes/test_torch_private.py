"""The private names of torch still mean what capture needs of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn

from autopar.passes import torch_private


def test_contexts_put_back() -> None:
    """Every switch is back where it was, also after an error."""
    checkpoint = torch.utils.checkpoint.CheckpointFunction
    assert not torch.compiler.is_compiling()
    try:
        with torch_private.as_if_compiling(), torch_private.without_checkpoints(), torch_private.without_whole_layers():
            assert torch.compiler.is_compiling()
            assert torch.utils.checkpoint.CheckpointFunction is not checkpoint
            assert not torch.backends.mkldnn.enabled
            raise RuntimeError("on the way")
    except RuntimeError:
        pass
    assert not torch.compiler.is_compiling()
    assert torch.utils.checkpoint.CheckpointFunction is checkpoint
    assert torch.backends.mkldnn.enabled


def test_trace_graph() -> None:
    """A trace is functional and decomposed; placeholders may be added on the way; real work stays outside of it."""
    seen: list[float] = []

    def function(x: Tensor) -> Tensor:
        wrapped = torch_private.wrap(x)
        before = torch_private.unwrap(wrapped)
        wrapped.add_(1.0)
        assert torch_private.unwrap(wrapped) is not before
        with torch_private.outside_of_trace():
            seen.append(float(torch.ones(3).sum()))
        with torch_private.without_tracing():
            extra = torch.empty(3)
        node = torch_private.new_placeholder("extra", extra)
        assert node in torch_private.tracing_graph().nodes
        result = torch_private.unwrap(wrapped * torch_private.wrap(extra))
        assert torch_private.node_of(result) is not None
        return result

    with torch_private.FakeTensorMode():
        graph_module = torch_private.trace_graph(function, [torch.empty(3)], {})
    names = [str(node.target) for node in graph_module.graph.nodes]
    assert names == ["x_1", "aten.add.Tensor", "extra", "aten.mul.Tensor", "output"]
    assert seen == [3.0]


def test_swapped_tensors() -> None:
    """Parameters and buffers are swapped, tied ones too, and what the model assigns comes back in the dict."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
            self.two.weight = self.one.weight
            self.register_buffer("mean", torch.zeros(2))

    model = Tied()
    weight, mean = model.one.weight, model.mean
    tensors = {"one.weight": torch.ones(2, 2), "mean": torch.ones(2)}
    with torch_private.swapped_tensors(model, tensors):
        assert model.one.weight is model.two.weight is tensors["one.weight"]
        model.mean = model.mean + 1
    assert model.one.weight is model.two.weight is weight and model.mean is mean
    assert tensors["mean"].tolist() == [2.0, 2.0]


def test_sequence_numbers() -> None:
    """The number of a forward autograd node is the one that its backward runs under."""
    found: list[int | None] = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            found.append(torch_private.last_forward_sequence())
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
            found.append(torch_private.current_backward_sequence())
            return grad

    Note.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert found[0] == found[1] and torch_private.current_backward_sequence() is None


def test_arguments_are_freed_at_their_last_use() -> None:
    """A graph that takes its arguments in a list empties it, and holds none longer than needed."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.neg.default, (x,))
    seen: list[bool] = []
    graph.call_function(lambda: seen.append(watched.expired()))
    graph.output((y,))
    module = fx.GraphModule(nn.Module(), torch_private.take_arguments_in_a_list(graph))
    arguments = [torch.ones(3)]
    watched = torch_private.StorageWeakRef(arguments[0].untyped_storage())
    assert module(arguments)[0].tolist() == [-1.0, -1.0, -1.0]
    assert seen == [True] and arguments == []


@pytest.mark.parametrize("kept", [False, True])
def test_clear_saved_tensors(kept: bool) -> None:
    """What an autograd function saved is dropped during its backward, unless the graph is kept."""
    seen: list[bool] = []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x.detach().clone())
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            saved = list(ctx.saved_tensors)
            watched = torch_private.StorageWeakRef(saved.pop().untyped_storage())
            torch_private.clear_saved_tensors(ctx)
            seen.append(watched.expired())
            return gradient

    Function.apply(torch.ones(3, requires_grad=True)).sum().backward(retain_graph=kept)
    assert seen == [not kept]
