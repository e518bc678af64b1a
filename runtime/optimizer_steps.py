"""How many steps any torch optimizer has taken in this process."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

_steps = [0]


def steps_taken() -> int:
    """Return the count."""
    return _steps[0]


def _count_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    _steps[0] += 1


register_optimizer_step_post_hook(_count_step)
