"""Check that a small model computes the same under random legal plans as on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.program import Program
from autopar.runtime.verify_ranks import verify_ranks
from tests.strategies.plans import seeded_plan


class Around(nn.Module):
    """A linear layer of width 6 in double precision, a function of its result, and modules that the function uses."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6).double()
        self.function = function
        self.inner = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the function makes of the layer's result."""
        return self.function(self.first(x), *self.inner)


def verified(model: nn.Module, args: Sequence[Any], meshes: Sequence[tuple[int, ...]] = ((3,), (2, 2))) -> Program:
    """Run ``model`` by a random plan on every mesh and compare; return the program."""
    program = annotate(capture(model, tuple(args)))
    for seed, sizes in enumerate(meshes):
        verify_ranks(model, program, seeded_plan(program, Mesh(sizes), seed), tuple(args))
    return program


def verified_function(function: Callable[..., Tensor], *modules: nn.Module) -> Program:
    """Do the same with a function of a ``[4, 6]`` tensor that has a gradient."""
    return verified(Around(function, *modules), (torch.randn(4, 6, dtype=torch.float64),))
