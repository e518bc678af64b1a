"""Find the collectives of a graph with what belongs to each: how operands are prepared and results finished."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from ..collective_calls import WAIT, Call, collective_calls, is_collective


@dataclass(frozen=True)
class Transfer:
    """A collective call (of one or several collectives) and the nodes that only serve it. Positions count nodes.

    Attributes:
        node: the call.
        calls: its collectives.
        before: nodes that prepare operands and that nobody else reads, in order.
        after: results taken apart, waits, and nodes that only finish results, in order.
        issued: where the first node of ``before``, or the call, stands.
        ready: the first position at which it can start: behind everything that ``before`` and the call read.
        first_use: where somebody reads what comes out; the end of the phase for what is only returned or saved.
        follows: it starts from what another collective brought.
    """

    node: fx.Node
    calls: tuple[Call, ...]
    before: tuple[fx.Node, ...]
    after: tuple[fx.Node, ...]
    issued: int
    ready: int
    first_use: int
    follows: bool

    @property
    def result_bytes(self) -> int:
        """Bytes that come to be when it starts: what comes out, and prepared operands."""
        return sum(call.value.nbytes for call in self.calls) + sum(
            call.bytes_in for call in self.calls if call.operand in self.before
        )

    @property
    def held_bytes(self) -> int:
        """Bytes of operands that nobody would keep but the collective, until the wait."""
        return sum(call.bytes_in for call in self.calls if call.holds_operand and call.operand.op != "placeholder")


def transfers(graph: fx.Graph) -> list[Transfer]:
    """Return every collective call of a lowered joint graph, in order."""
    nodes = list(graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    spans = phase_spans(nodes)
    return [_transfer(node, position, spans) for node in nodes if is_collective(node)]


def phase_spans(nodes: list[fx.Node]) -> dict[str, tuple[int, int]]:
    """Return for each phase the position of its first op and the one behind its last."""
    out: dict[str, tuple[int, int]] = {}
    for index, node in enumerate(nodes):
        if node.op not in ("placeholder", "output"):
            phase = node.meta["phase"]
            out[phase] = (out.get(phase, (index, 0))[0], index + 1)
    return out


def _transfer(node: fx.Node, position: dict[fx.Node, int], spans: dict[str, tuple[int, int]]) -> Transfer:
    start, end = spans[node.meta["phase"]]
    before = _before(node)
    after = _after(node, position)
    inside = {node, *before, *after}
    read = {source for part in (*before, node) for source in part.all_input_nodes} - inside
    behind = [position[source] + 1 for source in read if source.op not in ("placeholder", "get_attr")]
    uses = [position[user] for part in after for user in part.users if user not in inside]
    issued = min(position[part] for part in (*before, node))
    return Transfer(
        node=node,
        calls=collective_calls(node),
        before=before,
        after=after,
        issued=issued,
        ready=min(max([start, *behind]), issued),
        first_use=min([end, *uses]),
        follows=any(source.target is WAIT or _finishes(source) for source in read),
    )


def _before(call: fx.Node) -> tuple[fx.Node, ...]:
    """Return the nodes of the arc that lead to a call alone, in order."""
    found: list[fx.Node] = []
    inside = {call}
    queue = list(call.all_input_nodes)
    while queue:
        node = queue.pop(0)
        alone = all(user in inside for user in node.users)
        if node in inside or not (alone and _serves(node)) or _finishes(node) or node.target is WAIT:
            continue
        inside.add(node)
        found.insert(0, node)
        queue += node.all_input_nodes
    return tuple(found)


def _after(call: fx.Node, position: dict[fx.Node, int]) -> tuple[fx.Node, ...]:
    """Return the nodes that take results apart, wait for them, and finish them, in order."""
    inside = {call}
    queue = sorted(call.users, key=position.__getitem__)
    while queue:
        node = queue.pop(0)
        if node in inside or not (_serves(node) and all(source in inside for source in node.all_input_nodes)):
            continue
        inside.add(node)
        if "layout" not in node.meta:
            queue = sorted({*queue, *node.users}, key=position.__getitem__)
    return tuple(sorted(inside - {call}, key=position.__getitem__))


def _serves(node: fx.Node) -> bool:
    """Tell whether a node is a step of an arc, and no collective itself."""
    return node.op == "call_function" and "arc" in node.meta and not is_collective(node)


def _finishes(node: fx.Node) -> bool:
    """Tell whether a node is the last step of an arc."""
    return _serves(node) and "layout" in node.meta
