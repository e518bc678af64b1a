"""What each op reads and writes itself when a compiler runs chains of pointwise ops and reductions as one kernel.

A kernel is a set of pointwise ops and reductions over equally many elements, of one phase, that feed each other, views
between them included. It reads a tensor from outside once, keeps what only it reads to itself, and is launched once.
The reads are charged to the first op that needs them, a write to the op that makes it, the launch to the first op.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..program import Program, is_getitem, result_values, tensor_operands
from .compute import is_view

_aten = torch.ops.aten

REDUCTIONS: frozenset[str] = frozenset(
    str(packet)
    for packet in (
        _aten.sum,
        _aten.mean,
        _aten.amax,
        _aten.amin,
        _aten.max,
        _aten.min,
        _aten.any,
        _aten.all,
        _aten.var,
        _aten.var_mean,
        _aten.std,
        _aten.prod,
        _aten.logsumexp,
        _aten._softmax,
        _aten._log_softmax,
        _aten._softmax_backward_data,
        _aten._log_softmax_backward_data,
        _aten.native_layer_norm,
    )
)
"""Ops that a compiler fuses with the pointwise ops around them, besides pointwise ops themselves."""

POINTWISE: frozenset[str] = frozenset(
    str(packet)
    for packet in (
        _aten._to_copy,
        _aten.clone,
        _aten.where,
        _aten.full,
        _aten.full_like,
        _aten.zeros_like,
        _aten.ones_like,
        _aten.scalar_tensor,
        _aten.arange,
        _aten.tril,
        _aten.triu,
        _aten.cat,
        _aten.native_dropout_backward,
        torch.ops.prims.convert_element_type,
    )
) | {"autopar.bernoulli"}
"""Ops without the tag that compute every element by itself."""


@dataclass(frozen=True)
class Traffic:
    """What of an op's operands and results passes through memory.

    Attributes:
        kept_operands, kept_results: positions of those that stay in the kernel, or that another op of it has read.
        launches: 1 for the op that starts the kernel, 0 for the others.
    """

    kept_operands: tuple[int, ...] = ()
    kept_results: tuple[int, ...] = ()
    launches: float = 1.0

    def share(self, side: str, position: int) -> float:
        """Return 1 for an operand or a result (``side``) that passes through memory, else 0."""
        return float(position not in (self.kept_operands if side == "operands" else self.kept_results))


ALONE = Traffic()
"""An op in a kernel of its own."""


def fuses(target: Any) -> bool:
    """Tell whether a compiler runs this op together with pointwise ops around it."""
    packet = str(getattr(target, "overloadpacket", target))
    return packet in REDUCTIONS or packet in POINTWISE or torch.Tag.pointwise in getattr(target, "tags", ())


def mark_traffic(program: Program, class_of: Mapping[str, str]) -> Program:
    """Put ``meta["traffic"]`` on every op of a program; ops of one class get the traffic of its middle one.

    Args:
        program: captured.
        class_of: op -> the first of the ops that decide alike, so that equal ops stay equal.
    """
    traffic = _Kernels(program).traffic()
    members: dict[str, list[str]] = defaultdict(list)
    for name in traffic:
        members[class_of.get(name, name)].append(name)
    for names in members.values():
        shared = traffic[names[len(names) // 2]]
        for name in names:
            traffic[name] = shared
    for node in program.ops():
        node.meta["traffic"] = traffic[node.name]
    return program


class _Kernels:
    def __init__(self, program: Program) -> None:
        self.ops = [node for node in program.ops() if not is_view(node.target)]
        self.views = [node for node in program.ops() if is_view(node.target)]
        self.kernel: dict[str, str] = {}
        for node in self.ops:
            self.kernel[node.name] = self._kernel_of(node)

    def _kernel_of(self, node: fx.Node) -> str:
        """Return the kernel of the last producer that the op can join, else a new one called after it."""
        if not fuses(node.target):
            return node.name
        joined = [
            self.kernel[source.name]
            for source in map(_source, tensor_operands(node))
            if source.name in self.kernel
            and fuses(source.target)
            and source.meta["phase"] == node.meta["phase"]
            and _elements(source) == _elements(node)
        ]
        return joined[-1] if joined else node.name

    def traffic(self) -> dict[str, Traffic]:
        out = {node.name: Traffic(launches=0.0) for node in self.views}
        read: set[tuple[str, str]] = set()
        started: set[str] = set()
        for node in self.ops:
            kernel = self.kernel[node.name]
            kept = []
            for position, operand in enumerate(tensor_operands(node)):
                source = _source(operand)
                inside = self.kernel.get(source.name) == kernel
                if fuses(node.target) and (inside or (kernel, source.name) in read):
                    kept.append(position)
                read.add((kernel, source.name))
            results = tuple(i for i, (index, _) in enumerate(result_values(node)) if not self._leaves(node, index))
            out[node.name] = Traffic(tuple(kept), results, float(kernel not in started))
            started.add(kernel)
        return out

    def _leaves(self, node: fx.Node, index: int) -> bool:
        """Tell whether a result is read outside its kernel."""
        return any(self.kernel.get(user.name) != self.kernel[node.name] for user in _readers(node, index))


def _source(node: fx.Node) -> fx.Node:
    """Return the op behind views and ``getitem``."""
    while is_getitem(node) or (node.op == "call_function" and is_view(node.target)):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _readers(node: fx.Node, index: int | None = None) -> list[fx.Node]:
    """Return the ops that read a result, through views; the output node is one."""
    out = []
    for user in node.users:
        if is_getitem(user):
            if index is None or user.args[1] == index:
                out += _readers(user)
        elif user.op == "call_function" and is_view(user.target):
            out += _readers(user)
        else:
            out.append(user)
    return out


def _elements(node: fx.Node) -> int:
    """Return over how many elements an op loops."""
    tensors = [operand.meta["val"] for operand in tensor_operands(node)] + [value for _, value in result_values(node)]
    return max((tensor.numel() for tensor in tensors), default=0)
