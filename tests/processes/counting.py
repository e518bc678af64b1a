"""What the ranks of a pool run: steps whose collectives are counted where torch dispatches them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.processes.compare import build, loss_of, split

Move = tuple[str, int, int]
"""The kind of a collective, its axis and the bytes handed in."""

_KINDS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


class Counting(TorchDispatchMode):
    """Counts every functional collective; the agreements of the ranks on the host are others."""

    def __init__(self, axes: dict[str, int]) -> None:
        super().__init__()
        self.axes = axes
        self.moves: list[Move] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).rpartition(".")[2]
        if func.namespace == "_c10d_functional" and name != "wait_tensor":
            axis = next(self.axes[arg] for arg in args if isinstance(arg, str) and arg in self.axes)
            self.moves.append((_KINDS[name], axis, args[0].numel() * args[0].element_size()))
        return func(*args, **(kwargs or {}))


def count_collectives(name: str, sizes: tuple[int, ...], how: str) -> tuple[list[Move], list[Move]]:
    """Run forward and backward; return what ran on this rank and what the plan lists."""
    built = build(name)
    parallel, _ = split(built, sizes, how)
    groups = parallel._engine.groups
    counting = Counting({groups.group_name(axis): axis for axis in range(len(sizes))})
    parallel.train()
    with torch.enable_grad(), counting:
        loss_of(parallel(*built[1], **built[2])).backward()
    return counting.moves, [(row.kind, row.axis, row.bytes) for row in parallel.plan.collectives]
