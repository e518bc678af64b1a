"""Leave out what nobody reads."""

from __future__ import annotations

from torch import fx

from ..collective_calls import is_collective
from ..program import touches_generator
from .edits import Edit, Erase
from .setting import Setting


def drop_unused(joint: fx.GraphModule, setting: Setting) -> list[Edit]:
    """Return the ops whose results nobody reads, the last first.

    Random ops stay, so that those behind them draw the same numbers, and collectives, each of which the plan lists.
    """
    dead: set[fx.Node] = set()
    edits: list[Edit] = []
    for node in reversed(joint.graph.nodes):
        if node.op not in ("call_function", "get_attr") or not set(node.users) <= dead:
            continue
        if not (is_collective(node) or touches_generator(node) or _waits(node) or _writes(node)):
            dead.add(node)
            edits.append(Erase(node.name))
    return edits


def _waits(node: fx.Node) -> bool:
    return any(is_collective(source) for source in node.all_input_nodes)


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
