"""What a model does with ``.data`` is a write like any other, or refused."""

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


class Model(nn.Module):
    """A layer, a frozen one, a buffer and a plain tensor, with a function that does something with them."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.frozen = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("mean", torch.ones(3))
        self.plain, self.function = torch.ones(3), function

    def forward(self, x: Tensor) -> Tensor:
        """Return what the function makes."""
        return self.function(self, x)


def _set(owner: Any, value: Tensor) -> None:
    owner.data = value


def running(model: Any, x: Tensor) -> Tensor:
    """A buffer with a new memory; a view that was made before keeps the old one."""
    before = model.mean[:2]
    _set(model.mean, model.mean.data * 0.5 + x.detach().mean(0))
    return torch.cat([model.layer(x) * model.mean, before.expand(len(x), -1)], 1)


def shared(model: Any, x: Tensor) -> Tensor:
    """A buffer whose new memory is written to afterwards."""
    new = x.detach().mean(0)
    _set(model.mean, new)
    new.add_(1)
    return model.layer(x) * model.mean  # type: ignore[no-any-return]


def of_a_result(model: Any, x: Tensor) -> Tensor:
    """A tensor without a gradient."""
    y = model.layer(x).detach()
    _set(y, y.data.clamp(0))
    return model.layer(x) * y  # type: ignore[no-any-return]


@pytest.mark.parametrize("function", [running, shared, of_a_result])
def test_new_data_is_seen_by_what_follows(function: Callable[[Any, Tensor], Tensor]) -> None:
    """Outputs, gradients and buffers of three steps are those of one device."""
    expected = Model(function)
    found = copy.deepcopy(expected)
    split = SimulatedModule(found, Mesh((2,)), lambda program, mesh: seeded_plan(program, mesh, 0))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        theirs, ours = expected(x), split(x)
        torch.testing.assert_close(ours, theirs)
        theirs.square().sum().backward()
        ours.square().sum().backward()
    torch.testing.assert_close(found.layer.weight.grad, expected.layer.weight.grad)
    torch.testing.assert_close(found.mean, expected.mean)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m, x: (_set(m.frozen.weight, m.layer.weight.data), m.frozen(x))[1], "its parameter frozen.weight"),
        (lambda m, x: (_set(m.layer.weight, m.layer.weight.data.clamp(0)), m.layer(x))[1], "parameter layer.weight"),
        (lambda m, x: (y := m.layer(x), _set(y, y.data.clamp(0)))[0], r"has a gradient at .*test_trace_data"),
        (lambda m, x: (_set(m.plain, m.plain * 2), m.layer(x) * m.plain)[1], r"neither .* at .*test_trace_data"),
        (lambda m, x: (m.plain.data.mul_(2), m.layer(x) * m.plain)[1], "attribute plain.* register_buffer"),
    ],
)
def test_data_that_is_lost_otherwise(function: Callable[[Any, Tensor], Tensor], message: str) -> None:
    """Parameters, what has a gradient, and tensors that are not registered."""
    with pytest.raises(CaptureError, match=message):
        capture(Model(function), (torch.zeros(4, 3),))
