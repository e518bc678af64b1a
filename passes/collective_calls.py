"""Read the collectives of a node: one, or several that run as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .insert_collectives import COLLECTIVES
from .local_program import group_axes

_C10D: Any = torch.ops._c10d_functional

WAIT: Any = _C10D.wait_tensor.default
"""The op that makes a collective's result ready."""

COALESCED: dict[Any, Any] = {
    _C10D.all_gather_into_tensor_coalesced.default: _C10D.all_gather_into_tensor.default,
    _C10D.all_reduce_coalesced.default: _C10D.all_reduce.default,
    _C10D.reduce_scatter_tensor_coalesced.default: _C10D.reduce_scatter_tensor.default,
}
"""Op that runs several collectives as one -> the op of each. It takes a list of operands and returns one of results."""

IN_PLACE: dict[Any, Any] = {
    _C10D.all_reduce.default: _C10D.all_reduce_.default,
}
"""Op -> the same that works on its operands; what it returns lies in their memory."""

_ALL = frozenset({*COLLECTIVES, *COALESCED})
_OUT_OF_PLACE = {mine: other for other, mine in IN_PLACE.items()}


@dataclass(frozen=True)
class Call:
    """One collective of a node.

    Attributes:
        kind: as ``Arc.kind``.
        op: the single op.
        steps: ``(axis, why)`` of every arc that it carries out, in order; several for one on several axes.
        operand: the node that it hands in.
        arguments: the op's arguments after the operand, the group last.
        value: the local tensor that comes out, on meta.
        origin: the global node whose tensor moves.
        in_place: the result lies in the memory of the operand.
    """

    kind: str
    op: Any
    steps: tuple[tuple[int, str], ...]
    operand: fx.Node
    arguments: tuple[Any, ...]
    value: torch.Tensor
    origin: str
    in_place: bool = False

    @property
    def axes(self) -> tuple[int, ...]:
        """Axes of the mesh, in the order of the arcs."""
        return tuple(axis for axis, _ in self.steps)

    @property
    def reason(self) -> str:
        """Why it runs."""
        return "; ".join(dict.fromkeys(reason for _, reason in self.steps))

    @property
    def bytes_in(self) -> int:
        """Bytes that this rank hands in."""
        handed: torch.Tensor = self.operand.meta["val"]
        return handed.numel() * handed.element_size()

    @property
    def holds_operand(self) -> bool:
        """Tell whether what is handed in stays alive until the wait; an all-reduce works on a copy, its result."""
        return self.kind != "all_reduce"


def is_collective(node: fx.Node) -> bool:
    """Tell whether a node runs one collective, or several as one."""
    return node.op == "call_function" and _functional(node) in _ALL


def is_coalesced(node: fx.Node) -> bool:
    """Tell whether a node runs several collectives as one: it takes and returns lists."""
    return _functional(node) in COALESCED


def _functional(node: fx.Node) -> Any:
    return _OUT_OF_PLACE.get(node.target, node.target)


def collective_calls(node: fx.Node) -> tuple[Call, ...]:
    """Return the collectives that a node runs, in order; none for any other node."""
    if not is_collective(node):
        return ()
    target = _functional(node)
    op = COALESCED.get(target, target)
    first, *rest = node.args
    if op is target:
        steps = node.meta.get("steps") or tuple((axis, node.meta.get("reason", "")) for axis in group_axes(rest[-1]))
        members: tuple[Any, ...] = ((first, node.meta.get("val"), node.meta.get("origin", ""), steps),)
    else:
        members = tuple(
            (operand, value, *member)
            for operand, value, member in zip(first, node.meta["val"], node.meta["members"], strict=True)  # type: ignore[arg-type]
        )
    return tuple(
        Call(COLLECTIVES[op], op, steps, operand, tuple(rest), value, origin, target is not node.target)
        for operand, value, origin, steps in members
    )
