"""Let all-reduces work on what they are given, where nobody reads that any more."""

from __future__ import annotations

from torch import fx

from ..collective_calls import IN_PLACE, collective_calls
from .edits import Edit, Retarget
from .memories import Memories
from .setting import Setting


def reduce_in_place(joint: fx.GraphModule, setting: Setting) -> list[Edit]:
    """Return the all-reduces that need no copy of their operand.

    Safe where the operand's memory was made in this phase of the program, and nothing that may lie in it is read
    behind the call, by an op, by the backward, or as an output. With a budget the memory must be no larger than the
    result, which would keep all of it: a slice is copied.
    """
    memories = Memories(joint.graph, setting)
    edits: list[Edit] = []
    for node in joint.graph.nodes:
        if node.target not in IN_PLACE:
            continue
        (call,) = collective_calls(node)
        made_here = call.operand.meta["phase"] == node.meta["phase"]
        roomy = setting.memory_bytes is None or memories.largest_bytes(call.operand) <= call.value.nbytes
        if made_here and roomy and memories.ends_at(call.operand, node):
            edits.append(Retarget(node.name, IN_PLACE[node.target]))
    return edits
