"""Functions that remember their results do not hand traced ones to later calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autopar.passes.capture import capture


def remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that hides its cache in a closure."""
    cached = functools.lru_cache(maxsize=4)(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return cached(*args)

    return call


@functools.lru_cache
def steps(length: int) -> Tensor:
    """A cached function beside the class."""
    return torch.arange(length) * 1.0


class Remembers(nn.Module):
    """Positions by three cached functions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    @staticmethod
    @remembering
    def halves(length: int) -> Tensor:
        """A cache in a closure."""
        return torch.arange(length) * 0.5

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def thirds(self, length: int) -> Tensor:
        """A cached method."""
        return torch.arange(length) / 3

    def forward(self, x: Tensor) -> Tensor:
        """Add all positions."""
        result: Tensor = x * self.scale + self.halves(6) + self.thirds(6) + steps(6)
        return result


def test_a_model_still_runs_after_it_was_traced() -> None:
    """Nothing traced is left in any cache; what was cached before stays."""
    model, x = Remembers(), torch.randn(4, 6)
    capture(model, (x,))
    first = model(x)
    kept = steps(6)
    capture(model, (x,))
    assert torch.equal(model(x), first) and steps(6) is kept
