"""A module that runs all ranks of its plan, under ordinary autograd, beside the one it was made of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.mesh import Mesh
from autopar.runtime.simulated_module import SimulatedModule
from tests.strategies.plans import seeded_plan


class Two(nn.Module):
    """A layer, and a function of it and the inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        """Return what the function makes of them."""
        return self.function(self.layer, *inputs)


def with_complex_output(layer: nn.Module, x: Tensor) -> Any:
    y = layer(x)
    return y, torch.complex(y.sin(), y), y.sum().to(torch.complex64)


def with_complex_input(layer: nn.Module, z: Tensor) -> Any:
    return layer(z.real * z.abs()) * z.conj(), z * 2


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
Z = torch.complex(X, X.flip(0))


@pytest.mark.parametrize("function, value", [(with_complex_output, X), (with_complex_input, Z)])
@pytest.mark.parametrize("sizes", [(2, 2), (3,)], ids=str)
def test_gradients_of_complex_inputs_and_outputs(function: Any, value: Tensor, sizes: tuple[int, ...]) -> None:
    """They are parts of the step like real ones, whichever of them a loss outside of the module reads."""
    model = Two(function)
    split = SimulatedModule(copy.deepcopy(model), Mesh(sizes), lambda program, mesh: seeded_plan(program, mesh, 1))
    found = []
    for module in (model, split):
        x = value.clone().requires_grad_()
        out = module(x)
        sum((t.abs() ** 2 + t.real * t.imag if t.is_complex() else t**2).sum() for t in out).backward()
        found.append([x.grad, *(p.grad for p in module.parameters()), *out])
    for ours, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, expected)


def test_outputs_beside_a_loss_are_seen_by_autograd_as_on_one_device() -> None:
    """What is computed without gradients carries none, so that ``numpy()`` takes it; the rest does."""

    def run(layer: nn.Module, x: Tensor) -> Any:
        y = layer(x)
        right = (y.argmax(-1) == 2).float().mean()
        return (y - 1).square().mean(), right, y.detach(), y, torch.ones(3)

    model = Two(run)
    split = SimulatedModule(copy.deepcopy(model), Mesh((2,)), lambda program, mesh: seeded_plan(program, mesh, 1))
    assert (
        [t.requires_grad for t in split(X)] == [t.requires_grad for t in model(X)] == [True, False, False, True, False]
    )
