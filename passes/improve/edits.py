"""What passes change in a lowered graph: decided on the graph of the first rank, carried out on that of every rank.

Nodes are named, not held: the graphs of all ranks have the same sequence of names, so that the same edits keep it so.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import fx
from torch._ops import OpOverload

from ..collective_calls import COALESCED, collective_calls
from ..local_program import group_word

_SEVERAL = {single: op for op, single in COALESCED.items()}


class Edit(Protocol):
    """One change of a graph."""

    def apply(self, graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        """Change ``graph``; ``nodes`` are its nodes by name, kept up to date."""


@dataclass(frozen=True)
class Coalesce:
    """Run several collectives of one kind, group and dtype as one, in the place of the last of them.

    The order of nodes is left for ``Reorder``.
    """

    calls: tuple[str, ...]

    def apply(self, graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        """Put the new call and a ``getitem`` for each old one into the graph."""
        old = [nodes[name] for name in self.calls]
        members = [collective_calls(node)[0] for node in old]
        arguments = ([member.operand for member in members], *members[0].arguments)
        with graph.inserting_after(old[-1]):
            call = graph.create_node(
                "call_function", _SEVERAL[members[0].op], arguments, name=f"{old[0].name}_and_{len(old) - 1}"
            )
        call.meta.update(
            {key: old[0].meta[key] for key in ("phase", "origin", "arc")},
            module="",
            source="",
            val=tuple(member.value for member in members),
            reason="; ".join(dict.fromkeys(member.reason for member in members)),
            members=tuple((member.origin, member.steps) for member in members),
            replaces=old[0].name,
        )
        nodes[call.name] = call
        after = call
        for index, node in enumerate(old):
            with graph.inserting_after(after):
                part = graph.create_node("call_function", operator.getitem, (call, index), name=f"{node.name}_part")
            part.meta.update(node.meta, replaces=node.name)
            nodes[part.name] = after = part
            node.replace_all_uses_with(part)
            graph.erase_node(node)
            del nodes[node.name]


@dataclass(frozen=True)
class Join:
    """Let one all-reduce carry out another that starts from its result, on the group of the axes of both.

    Attributes:
        first: the name of the call that stays.
        between: of what leads from its wait to the other one, in order; nobody else reads it.
        second: of the other call.
    """

    first: str
    between: tuple[str, ...]
    second: str

    def apply(self, graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        """Widen the group of the first, and leave the second out."""
        first, second = nodes[self.first], nodes[self.second]
        steps = tuple(step for node in (first, second) for step in collective_calls(node)[0].steps)
        (wait,), (end,) = first.users, second.users
        first.args = (*first.args[:-1], group_word(axis for axis, _ in steps))
        first.meta.update(steps=steps, reason="; ".join(reason for _, reason in steps))
        wait.meta = dict(end.meta)
        end.replace_all_uses_with(wait)
        for name in (end.name, self.second, *reversed(self.between)):
            graph.erase_node(nodes.pop(name))


@dataclass(frozen=True)
class Reorder:
    """Run the nodes in another order; placeholders come first and the output last, as ever."""

    names: tuple[str, ...]

    def apply(self, graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        """Move the nodes."""
        output = graph.output_node()
        for name in self.names:
            output.prepend(nodes[name])


@dataclass(frozen=True)
class Merge:
    """Read ``first`` wherever ``second`` is read; ``second`` goes."""

    second: str
    first: str

    def apply(self, graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        """Replace the node."""
        gone, kept = nodes.pop(self.second), nodes[self.first]
        for key in ("tensor", "layout"):
            if key in gone.meta:
                kept.meta.setdefault(key, gone.meta[key])
        gone.replace_all_uses_with(kept)
        graph.erase_node(gone)


@dataclass(frozen=True)
class Erase:
    """Leave a node out that nobody reads."""

    name: str

    def apply(self, graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        """Erase the node."""
        graph.erase_node(nodes.pop(self.name))


@dataclass(frozen=True)
class Retarget:
    """Carry a node out by another op with the same arguments.

    Attributes:
        name: of the node.
        target: the op.
        out: the argument by which the op is told where to write, if it is.
        slot: the operand into which it writes then.
    """

    name: str
    target: OpOverload
    out: str | None = None
    slot: int = 0

    def apply(self, graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        """Change the op."""
        node = nodes[self.name]
        node.target = self.target
        if self.out is not None:
            node.kwargs = {**node.kwargs, self.out: node.args[self.slot]}


def apply_edits(graphs: Sequence[fx.Graph], edits: Sequence[Edit]) -> None:
    """Carry out the edits, in order, on each graph."""
    for graph in graphs:
        nodes = {node.name: node for node in graph.nodes}
        for edit in edits:
            edit.apply(graph, nodes)
