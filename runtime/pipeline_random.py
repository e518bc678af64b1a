"""Random numbers of a pipeline: every stage starts where the stages before it have stopped drawing."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.passes.stage_pieces import StagedProgram

from .randomness import generator_state, set_generator_state


def starts_of_stages(staged: StagedProgram, device: torch.device) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Return the generator's state where each stage's forward starts to draw, and that after all draws.

    Every micro-batch draws the masks of the whole batch and keeps its part, so all of them start in the same state. One
    stage alone needs no replay: its own last forward leaves the generator where it belongs; the state returned as the
    last is then None's place holder, the first.
    """
    starts: dict[int, torch.Tensor] = {}
    before = generator_state(device)
    number = torch.zeros((), dtype=torch.int64)
    for draw in staged.draws:
        if draw.stage not in starts:
            starts[draw.stage] = generator_state(device)
        args, kwargs = pytree.tree_map(lambda leaf: _filled(leaf, number, device), (draw.args, draw.kwargs))
        draw.target(*args, **kwargs)
    after = generator_state(device)
    set_generator_state(device, before)
    return starts, after


def _filled(leaf: Any, number: torch.Tensor, device: torch.device) -> Any:
    if leaf is None:
        return number
    return device if isinstance(leaf, torch.device) else leaf
