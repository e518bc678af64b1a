"""Which values of a lowered graph may lie in one memory, who made that memory, and until when it is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ..collective_calls import WAIT, collective_calls
from ..program import is_getitem
from .setting import Setting

_ATEN: Any = torch.ops.aten

_FRESH: frozenset[Any] = frozenset({_ATEN.linear.default, _ATEN.matmul.default, _ATEN.einsum.default})
"""Composite ops that return new memory when they are given two tensors; of others that is not known."""

_UNSAID: frozenset[Any] = frozenset(
    {_ATEN._unsafe_view.default, _ATEN.unsafe_split.Tensor, _ATEN.unsafe_split_with_sizes.default}
)
"""Ops that return views although their schemas do not say so."""

_KNOWN = ("aten", "prims", "autopar", "_c10d_functional")
"""Namespaces whose schemas are believed; somebody's own op may hand its operand on and say nothing."""


class Memories:
    """The memories of a graph. Whatever may be a view counts as one: how tensors lie is known only when it runs."""

    def __init__(self, graph: fx.Graph, setting: Setting) -> None:
        self._position = {node: index for index, node in enumerate(graph.nodes)}
        self._owner: dict[fx.Node, fx.Node] = {}
        self._members: dict[fx.Node, list[fx.Node]] = {}
        items: dict[tuple[fx.Node, Any], fx.Node] = {}
        for node in graph.nodes:
            self._owner[node], self._members[node] = node, [node]
            for source in _shares_with(node):
                self.join(source, node)
            if is_getitem(node):
                self.join(items.setdefault((node.all_input_nodes[0], node.args[1]), node), node)
        foreign = (node for node in graph.nodes if _is_foreign(node, setting))
        self._foreign = {self._owner[node] for node in foreign}
        self._last_read = {
            owner: max((self._read_until(node) for node in nodes), default=-1) for owner, nodes in self._members.items()
        }

    def join(self, one: fx.Node, other: fx.Node) -> None:
        """Say that two values lie in one memory."""
        first, second = self._owner[one], self._owner[other]
        if first is second:
            return
        for moved in self._members[second]:
            self._owner[moved] = first
        self._members[first] += self._members.pop(second)
        if "_last_read" in vars(self):
            self._last_read[first] = max(self._last_read[first], self._last_read.pop(second))
            self._foreign |= {first} if second in self._foreign else set()

    def same(self, one: fx.Node, other: fx.Node) -> bool:
        """Tell whether two values may lie in one memory."""
        return self._owner[one] is self._owner[other]

    def is_foreign(self, node: fx.Node) -> bool:
        """Tell whether the memory of a value may be one that the graph was given."""
        return self._owner[node] in self._foreign

    def ends_at(self, node: fx.Node, reader: fx.Node) -> bool:
        """Tell whether the memory of ``node`` was made by this program and is read by nobody behind ``reader``."""
        owner = self._owner[node]
        return owner not in self._foreign and self._last_read[owner] <= self._position[reader]

    def largest_bytes(self, node: fx.Node) -> int:
        """Return the bytes of the largest value that may lie in the memory of ``node``."""
        values = [member.meta.get("val") for member in self._members[self._owner[node]]]
        return max(value.nbytes for value in values if isinstance(value, torch.Tensor))

    def _read_until(self, node: fx.Node) -> int:
        """Return the last position at which somebody reads a value; a collective reads until the wait for it."""
        last = -1
        for user in node.users:
            last = max(last, self._position[user])
            if any(call.holds_operand for call in collective_calls(user)):
                last = max([last, *(self._position[wait] for wait in _waits(user))])
        return last


def _waits(call: fx.Node) -> list[fx.Node]:
    """Return the nodes that wait for a collective, or for the parts of it."""
    parts = [part for user in call.users for part in ([user] if user.target is WAIT else user.users)]
    return [part for part in parts if part.target is WAIT]


def may_be_view(node: fx.Node) -> bool:
    """Tell whether a result of an op may lie in the memory of an operand."""
    if node.op != "call_function":
        return False
    if is_getitem(node):
        return may_be_view(node.all_input_nodes[0])  # the results of an op lie in memories of their own
    target = node.target
    if not isinstance(target, OpOverload) or target is WAIT:
        return True
    if target in _FRESH and len(node.all_input_nodes) > 1:
        return False
    return _hides_views(target) or any(result.alias_info is not None for result in target._schema.returns)


def _shares_with(node: fx.Node) -> list[fx.Node]:
    """Return the operands in whose memory a result may lie."""
    if not may_be_view(node):
        return []
    target = node.target
    if not isinstance(target, OpOverload) or target is WAIT or _hides_views(target):
        return node.all_input_nodes
    returned = [result.alias_info.after_set for result in target._schema.returns if result.alias_info]
    anything = not all(returned)  # a list of views names no operand
    sets = {name for names in returned for name in names}
    found = []
    for argument, given in schema_arguments(node):
        if argument.alias_info and (anything or sets & argument.alias_info.before_set):
            found += [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, fx.Node)]
    return found


def schema_arguments(node: fx.Node) -> Iterator[tuple[torch.Argument, Any]]:
    """Yield every argument of an op's schema, and what the node gives for it; None for what it leaves out."""
    assert isinstance(node.target, OpOverload)
    for index, argument in enumerate(node.target._schema.arguments):
        yield argument, node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)


def _hides_views(target: OpOverload) -> bool:
    """Tell whether results may lie in the memory of operands whatever the schema says."""
    composite = target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return composite or target in _UNSAID or target.namespace not in _KNOWN


def _is_foreign(node: fx.Node, setting: Setting) -> bool:
    """Tell whether the memory outlives the step: what comes in, constants, and copies of parameters that are kept."""
    return node.op in ("placeholder", "get_attr") or (node.meta.get("tensor"), node.meta.get("layout")) in setting.kept
