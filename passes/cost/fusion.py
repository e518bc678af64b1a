"""What each op reads and writes itself when a compiler runs chains of pointwise ops and reductions as one kernel.

A kernel is a set of pointwise ops and reductions over equally many elements, of one phase, that feed each other or
read the same, views between them included. It reads a tensor once, keeps to itself what only it reads, and is launched
once.
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
) | {"autopar.moments", "autopar.normalise_sums"}
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
        _aten.slice_backward,
        _aten.scatter_add,
        _aten.native_dropout_backward,
        torch.ops.prims.convert_element_type,
    )
) | {"autopar.bernoulli", "autopar.normalise", "autopar.normalise_backward", "autopar.statistics"}
"""Ops without the tag that compute every element by itself."""


GATHERS: frozenset[str] = frozenset(
    str(packet) for packet in (_aten.gather, _aten.index_select, _aten.embedding, _aten.index)
)
"""Ops that read of their first operand no more than they return."""


@dataclass(frozen=True)
class Traffic:
    """What of an op's operands and results passes through memory.

    Attributes:
        kept_operands, kept_results: positions of those that stay in the kernel, or that another op of it has read, and
            of a table of which an op reads no more than it returns.
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
    """Which ops share a kernel: those of one level that feed each other or read the same tensor.

    The level of an op counts the ops that can't be fused on the longest way to it, so that nothing that a kernel reads
    depends on what it computes.
    """

    def __init__(self, program: Program) -> None:
        self.ops = [node for node in program.ops() if not is_view(node.target)]
        self.views = [node for node in program.ops() if is_view(node.target)]
        self.level: dict[str, int] = {}
        self.first: dict[str, str] = {}
        self.order = {node.name: i for i, node in enumerate(self.ops)}
        seen: dict[tuple[object, ...], str] = {}
        for node in self.ops:
            sources = [_source(operand) for operand in tensor_operands(node)]
            self.level[node.name] = max((self._level_after(source) for source in sources), default=0)
            self.first[node.name] = node.name
            if fuses(node.target):
                self._join(node, sources, seen)
        self.kernel = {name: self._find(name) for name in self.first}

    def _level_after(self, source: fx.Node) -> int:
        return self.level.get(source.name, 0) + (source.name in self.level and not fuses(source.target))

    def _join(self, node: fx.Node, sources: list[fx.Node], seen: dict[tuple[object, ...], str]) -> None:
        alike = (self.level[node.name], node.meta["phase"], _elements(node))
        for source in sources:
            for name in (source.name, seen.get((source.name, *alike))):
                if name is not None and seen.get((name, *alike, "made")) is not None:
                    one, other = sorted((self._find(name), self._find(node.name)), key=self.order.__getitem__)
                    self.first[other] = one
            seen[source.name, *alike] = node.name
        seen[node.name, *alike, "made"] = node.name

    def _find(self, name: str) -> str:
        while self.first[name] != name:
            name = self.first[name]
        return name

    def traffic(self) -> dict[str, Traffic]:
        out = {node.name: Traffic(launches=0.0) for node in self.views}
        read: set[tuple[str, str]] = set()
        started: set[str] = set()
        for node in self.ops:
            kernel = self.kernel[node.name]
            kept = [0] if str(getattr(node.target, "overloadpacket", node.target)) in GATHERS else []
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
