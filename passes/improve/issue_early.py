"""Start collectives before their results are needed."""

from __future__ import annotations

import numpy as np
from torch import fx

from .edits import Edit
from .headroom import headroom
from .setting import Setting
from .sort_nodes import Key, sort_nodes
from .transfers import transfers

AHEAD = 2
"""Bytes that are brought ahead of their use, in those of the largest collective: while one is used, the next comes."""


def issue_early(joint: fx.GraphModule, setting: Setting) -> list[Edit]:
    """Return the order in which every collective starts as soon as its operands are there, as far as memory allows.

    What has come and is not used yet is bounded: by the budget, or the highest moment of the graph where that is more,
    and by ``AHEAD`` times the largest collective. Those that are needed first come first.

    Safe always: nothing but collectives and what prepares them moves, and not before what they read.
    """
    found = transfers(joint.graph)
    if not found:
        return []
    room = headroom(joint, setting)
    bound = AHEAD * max(each.result_bytes for each in found)
    ahead = np.zeros_like(room)
    keys: dict[fx.Node, Key] = {}
    for each in found:
        window = slice(each.ready, each.issued)
        full = (ahead[window] + each.result_bytes > np.minimum(bound, room[window])).nonzero()[0]
        start = each.ready + int(full[-1]) + 1 if len(full) else each.ready
        ahead[start : each.issued] += each.result_bytes
        if start < each.issued:
            keys.update(dict.fromkeys((*each.before, each.node), (start - 0.5, each.issued)))
    return list(sort_nodes(joint.graph, keys))
