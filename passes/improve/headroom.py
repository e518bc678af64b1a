"""Bytes that may come to be beside what is alive anyway."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import fx

from .live_profile import live_profile
from .setting import Setting

_UNBOUNDED = np.iinfo(np.int64).max // 2


def headroom(joint: fx.GraphModule, setting: Setting) -> np.ndarray[Any, Any]:
    """Return for each node of the graph how many more bytes may be alive while it runs.

    The bound is the budget, or the highest moment of the graph as it stands where that is more; without a budget there
    is none. Beside a part of a program (without outputs) others may be alive: it gets no room.
    """
    nodes = list(joint.graph.nodes)
    if setting.memory_bytes is None:
        return np.full(len(nodes), _UNBOUNDED, dtype=np.int64)
    if not setting.outputs:
        return np.zeros(len(nodes), dtype=np.int64)
    profile = live_profile(joint, setting)
    bound = max([setting.memory_bytes, *profile.values()])
    alive: list[int] = []
    for node in nodes:  # parts of what runs as one have no moment of their own
        alive.append(profile.get(node.name, alive[-1] if alive else 0))
    return bound - np.array(alive, dtype=np.int64)
