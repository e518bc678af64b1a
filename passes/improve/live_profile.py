"""Tell how many bytes are alive while each op of a lowered joint graph runs."""

from __future__ import annotations

from torch import fx

from ..cost.live_bytes import live_bytes
from ..local_program import LocalProgram
from ..split_phases import split_phases
from .setting import Setting


def live_profile(joint: fx.GraphModule, setting: Setting) -> dict[str, int]:
    """Return op name -> bytes that are alive at most while it runs, on the rank of the graph, as it stands."""
    forward, backward, num_saved = split_phases(joint, setting.inputs, setting.outputs, callable_halves=False)
    found: dict[str, int] = {}

    def watch(node: fx.Node, num_bytes: int) -> None:
        found[node.name] = num_bytes

    program = LocalProgram(
        joint, forward, backward, setting.inputs, setting.outputs, {}, (), num_saved, setting.mesh, (0,)
    )
    live_bytes(program, setting.optimizer, watch)
    return found
