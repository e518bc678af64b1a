"""Calls the ops of a graph by the shortest way from Python.

``torch.ops`` reads a schema at each call; the functions of ``torch`` are generated for theirs and take a third of that.
A kernel written in Python is called without the dispatcher in between. Same kernels, same numbers: only for graphs that
run eagerly, outside autograd, on plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autopar.passes.cost.storages import CPU_KERNELS
from autopar.passes.cost.storages import KERNELS as ANY_KERNELS
from autopar.passes.ops import attention_kernels, norms

_ATEN: Any = torch.ops.aten
_NN: Any = torch._C._nn

DIRECT: dict[Any, Callable[..., Any]] = {
    _ATEN.add.Tensor: torch.add,
    _ATEN.add.out: torch.add,
    _ATEN.add_.Tensor: Tensor.add_,
    _ATEN.amax.default: torch.amax,
    _ATEN.bmm.default: torch.bmm,
    _ATEN.cat.default: torch.cat,
    _ATEN.clone.default: torch.clone,
    _ATEN.contiguous.default: Tensor.contiguous,
    _ATEN.convolution.default: torch.convolution,
    _ATEN.div.Tensor: torch.div,
    _ATEN.div.out: torch.div,
    _ATEN.div_.Tensor: Tensor.div_,
    _ATEN.embedding.default: torch.embedding,
    _ATEN.exp.default: torch.exp,
    _ATEN.exp_.default: Tensor.exp_,
    _ATEN.expand.default: Tensor.expand,
    _ATEN.gather.default: torch.gather,
    _ATEN.gelu.default: _NN.gelu,
    _ATEN.linear.default: _NN.linear,
    _ATEN.log.default: torch.log,
    _ATEN.matmul.default: torch.matmul,
    _ATEN.mean.dim: torch.mean,
    _ATEN.mm.default: torch.mm,
    _ATEN.mul.Tensor: torch.mul,
    _ATEN.mul.out: torch.mul,
    _ATEN.mul_.Tensor: Tensor.mul_,
    _ATEN.native_layer_norm.default: torch.native_layer_norm,
    _ATEN.neg.default: torch.neg,
    _ATEN.neg_.default: Tensor.neg_,
    _ATEN.permute.default: torch.permute,
    _ATEN.relu.default: torch.relu,
    _ATEN.relu_.default: torch.relu_,
    _ATEN.reshape.default: torch.reshape,
    _ATEN.rsqrt.default: torch.rsqrt,
    _ATEN.scatter_add_.default: Tensor.scatter_add_,
    _ATEN.select.int: torch.select,
    _ATEN.sigmoid.default: torch.sigmoid,
    _ATEN.silu.default: _NN.silu,
    _ATEN.split_with_sizes.default: torch.split_with_sizes,
    _ATEN.squeeze.dim: torch.squeeze,
    _ATEN.sub.Tensor: torch.sub,
    _ATEN.sub.out: torch.sub,
    _ATEN.sub_.Tensor: Tensor.sub_,
    _ATEN.sum.default: torch.sum,
    _ATEN.sum.dim_IntList: torch.sum,
    _ATEN.t.default: torch.t,
    _ATEN.tanh.default: torch.tanh,
    _ATEN.transpose.int: torch.transpose,
    _ATEN.unsqueeze.default: torch.unsqueeze,
    _ATEN.view.default: Tensor.view,
    _ATEN.where.self: torch.where,
}
"""Op -> the function of torch that takes the same arguments."""

KERNELS: dict[str, Mapping[Any, Callable[..., Any]]] = {
    "cpu": CPU_KERNELS,
    "cuda": {
        **ANY_KERNELS,
        **norms.KERNELS,
        torch.ops.autopar.attention.default: attention_kernels.forward_cuda,
        torch.ops.autopar.attention_backward.default: attention_kernels.backward_cuda,
    },
}
"""Type of device -> op -> its kernel in Python, which takes the same arguments."""


def call_directly(graph: fx.Graph, device: torch.device) -> None:
    """Change a bound graph in place, so that it calls functions of torch and kernels in Python."""
    kernels = KERNELS.get(device.type, {})
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        function = kernels.get(node.target) or DIRECT.get(node.target)
        if function is not None and _says_it_all(node):
            node.target = function


def _says_it_all(node: fx.Node) -> bool:
    """Tell whether the first operand is a tensor; a number in the place of another means the same to both."""
    return bool(node.args) and not isinstance(node.args[0], (int, float, complex))
