"""Functions that stand for ops take the same arguments and return the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autopar.passes.ops import attention_kernels
from autopar.runtime.call_directly import DIRECT, call_directly

ATEN: Any = torch.ops.aten


def _arguments(op: Any) -> list[Any]:
    """Return arguments for an op, by the names and types of its schema."""
    given: dict[str, Any] = {
        "IntArrayRef": [0],
        "Optional[List[int]]": [0],
        "List[int]": [0],
        "int": 0,
        "Tensor": torch.rand(3, 3) + 0.1,
    }
    special: dict[Any, list[Any]] = {
        ATEN.bmm.default: [torch.rand(2, 3, 4), torch.rand(2, 4, 5)],
        ATEN.cat.default: [[torch.rand(2, 3), torch.rand(1, 3)], 0],
        ATEN.convolution.default: [
            torch.rand(1, 2, 5), torch.rand(3, 2, 3), None, [1], [1], [1], False, [0], 1,
        ],
        ATEN.embedding.default: [torch.rand(5, 2), torch.tensor([1, 3])],
        ATEN.expand.default: [torch.rand(1, 3), [2, 3]],
        ATEN.gather.default: [torch.rand(3, 3), 1, torch.tensor([[0], [2], [1]])],
        ATEN.native_layer_norm.default: [torch.rand(2, 3), [3], torch.rand(3), torch.rand(3), 1e-5],
        ATEN.permute.default: [torch.rand(2, 3), [1, 0]],
        ATEN.reshape.default: [torch.rand(2, 3), [6]],
        ATEN.scatter_add_.default: [torch.rand(3, 3), 1, torch.tensor([[0], [2], [1]]), torch.rand(3, 1)],
        ATEN.select.int: [torch.rand(2, 3), 1, 2],
        ATEN.split_with_sizes.default: [torch.rand(6), [2, 4]],
        ATEN.squeeze.dim: [torch.rand(1, 3), 0],
        ATEN.transpose.int: [torch.rand(2, 3), 0, 1],
        ATEN.unsqueeze.default: [torch.rand(2, 3), 1],
        ATEN.view.default: [torch.rand(2, 3), [3, 2]],
        ATEN.where.self: [torch.tensor([True, False, True]), torch.rand(3), torch.rand(3)],
    }  # fmt: skip
    if op in special:
        return special[op]
    taken = [argument for argument in op._schema.arguments if not argument.kwarg_only]
    return [
        copy.copy(given[str(argument.type)])
        for argument in taken
        if not argument.has_default_value() or argument.name == "dim"
    ]


@pytest.mark.parametrize("op", DIRECT, ids=str)
def test_the_function_is_the_op(op: Any) -> None:
    """Bit by bit, also where the op is told where to write."""
    torch.manual_seed(0)
    results = []
    for call in (op, DIRECT[op]):
        torch.manual_seed(1)
        arguments = _arguments(op)
        kwargs = {"out": torch.empty(3, 3)} if op._overloadname == "out" else {}
        made = call(*arguments, **kwargs)
        results.append(made if isinstance(made, (tuple, list)) else [made])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def _graph(function: Callable[..., object]) -> fx.GraphModule:
    return fx.symbolic_trace(function)


@pytest.mark.parametrize("number", [2, 2.5, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64, torch.bool, torch.complex64])
def test_a_number_in_the_place_of_a_tensor(dtype: torch.dtype, number: float) -> None:
    """It takes part in the result's dtype alike."""
    x = torch.ones(3, dtype=dtype)
    for op in (ATEN.mul.Tensor, ATEN.add.Tensor, ATEN.div.Tensor):
        one, other = op(x, number), DIRECT[op](x, number)
        assert one.dtype == other.dtype and torch.equal(one, other)


def test_a_graph_calls_functions() -> None:
    """What a graph calls changes, what it computes does not."""

    def body(x: Tensor) -> Tensor:
        return ATEN.add.Tensor(ATEN.mul.Tensor(x, x), 2.0)  # type: ignore[no-any-return]

    module = _graph(body)
    x = torch.rand(4)
    before = module(x)
    call_directly(module.graph, torch.device("cpu"))
    module.recompile()
    assert "torch.mul" in module.code and "torch.add" in module.code
    assert torch.equal(module(x), before)


def test_kernels_in_python_are_called_as_they_are() -> None:
    """Attention on a CPU goes to the kernel that is registered for it; on a device without one it stays an op."""

    def body(q: Tensor) -> Any:
        return torch.ops.autopar.attention.default(q, q, q, None, True, 0.5, 0)

    for device, direct in (("cpu", True), ("meta", False)):
        module = _graph(body)
        call_directly(module.graph, torch.device(device))
        (node,) = [node for node in module.graph.nodes if node.op == "call_function"]
        assert (node.target is attention_kernels.forward_cpu) == direct
