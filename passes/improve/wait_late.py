"""Wait for collectives where their results are needed."""

from __future__ import annotations

from torch import fx

from .edits import Edit
from .headroom import headroom
from .setting import Setting
from .sort_nodes import Key, sort_nodes
from .transfers import Transfer, transfers

HELD = 2
"""Bytes of operands that are kept for collectives under way, in those of the largest: one goes while the next comes."""


def wait_late(joint: fx.GraphModule, setting: Setting) -> list[Edit]:
    """Return the order in which every wait stands before the first use of what it waits for, as far as memory allows.

    A collective keeps what it sends until it is waited for (an all-reduce sends its result). What is kept so is bounded
    as in ``issue_early``, by ``HELD``; over the bound, the oldest is waited for.

    Safe always: nothing but waits and what finishes results moves, and not behind a use.
    """
    keys: dict[fx.Node, Key] = {}
    for each, place in waits(joint, setting):
        keys.update({node: (place - 0.5, each.first_use, index) for index, node in enumerate(each.after)})
    return list(sort_nodes(joint.graph, keys))


def waits(joint: fx.GraphModule, setting: Setting) -> list[tuple[Transfer, int]]:
    """Return every collective and the position before which it is to be waited for."""
    found = [each for each in transfers(joint.graph) if each.after]
    if not found:
        return []
    room = headroom(joint, setting)
    bound = HELD * max(each.held_bytes for each in found)
    position = {node: index for index, node in enumerate(joint.graph.nodes)}
    starts = {position[each.node]: each for each in found}
    out: list[tuple[Transfer, int]] = []
    pending: list[Transfer] = []
    held = 0
    for index in range(len(room)):
        for each in [each for each in pending if each.first_use <= index]:
            pending.remove(each)
            held -= each.held_bytes
            out.append((each, index))
        coming = starts.get(index)
        needed = coming.held_bytes if coming is not None else 0
        while pending and held + needed > min(bound, int(room[index])):
            oldest = next((each for each in pending if each.held_bytes), None)
            if oldest is None:
                break
            pending.remove(oldest)
            held -= oldest.held_bytes
            out.append((oldest, index))
        if coming is not None:
            pending.append(coming)
            held += needed
    return [*out, *((each, each.first_use) for each in pending)]
