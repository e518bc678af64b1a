"""Places that a tensor of one number tells."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import CaptureError
from autopar.mesh import Mesh
from autopar.passes.capture import capture
from autopar.runtime.simulated_module import SimulatedModule
from tests.strategies.plans import seeded_plan


class Ring(nn.Module):
    """A layer, a buffer that is filled place by place, and the place."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(3, 4), function
        self.register_buffer("ring", torch.zeros(5, 4, 2))
        self.register_buffer("at", torch.tensor(-2))

    def forward(self, x: Tensor) -> Tensor:
        """Return what the function makes, and go on to the next place."""
        result = self.function(self, x)
        self.at.add_(1)
        return result


def one(model: Any, x: Tensor) -> Tensor:
    """A row is written and read; one of its numbers too."""
    y = model.layer(x)
    model.ring[model.at] = y.detach().mean(0)[:, None]
    model.ring[model.at, 1:, 0] += 1
    return y * model.ring[model.at][:, 0] + model.ring[..., model.at % 2].sum()


def two(model: Any, x: Tensor) -> Tensor:
    """Two places at once, a new dim and a list beside a place; gradients flow through reads and writes."""
    y = model.layer(x)
    z = torch.zeros(5, 4, 2)
    z[model.at, :, model.at % 2] = y.mean(0)
    z[model.at % 3, [0, 2]] = y[:2, :2]
    return z[:, None, model.at % 4] * z[model.at % 3, [0, 2], 1].sum() + y[model.at % 3, 2]


@pytest.mark.parametrize("function", [one, two])
@pytest.mark.parametrize("seed", [0, 1])
def test_places(function: Callable[[Any, Tensor], Tensor], seed: int) -> None:
    """Outputs, gradients and buffers of four steps are those of one device; places below zero count from the end."""
    expected = Ring(function)
    found = copy.deepcopy(expected)
    split = SimulatedModule(found, Mesh((2, 2)), lambda program, mesh: seeded_plan(program, mesh, seed))
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    for _ in range(4):
        theirs, ours = expected(x), split(x)
        torch.testing.assert_close(ours, theirs)
        theirs.square().sum().backward()
        ours.square().sum().backward()
    torch.testing.assert_close(found.layer.weight.grad, expected.layer.weight.grad)
    torch.testing.assert_close(found.ring, expected.ring)


def test_what_was_read_is_no_view() -> None:
    """A write into it would be lost, also where it goes to another place."""
    ring = Ring(lambda m, x: (y := m.ring[m.at], y.add_(1), m.ring.__setitem__(0, y), m.layer(x))[-1])
    with pytest.raises(CaptureError, match="writes into what it reads"):
        capture(ring, (torch.zeros(5, 3),))
    ring = Ring(lambda m, x: (m.ring[m.at].add_(1), m.layer(x))[1])
    with pytest.raises(CaptureError, match=r"writes into what it reads at .*test_trace_places.*x\[i\] = value"):
        capture(ring, (torch.zeros(5, 3),))
    ring = Ring(lambda m, x: (m.ring[m.at][0].zero_(), m.layer(x))[1])
    with pytest.raises(CaptureError, match="writes into what it reads"):
        capture(ring, (torch.zeros(5, 3),))
