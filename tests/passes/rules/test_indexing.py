"""Indices that no entry has: whichever rank's they would be, the step raises as it does on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.mesh import Mesh
from autopar.runtime.simulated_module import SimulatedModule
from tests.strategies.plans import seeded_plan


class Indexed(nn.Module):
    """A table, and a function of it and of indices."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(7, 4))
        self.function = function

    def forward(self, index: Tensor) -> Tensor:
        """Return what the function reads or writes."""
        return self.function(self.table, index)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "embedding": lambda table, index: F.embedding(index, table),
    "gather": lambda table, index: table.gather(0, index[:, None].expand(-1, 4)),
    "index_select": lambda table, index: table.index_select(0, index),
    "index": lambda table, index: table[index],
    "scatter": lambda table, index: (table * 2).scatter(0, index[:, None].expand(-1, 4), 3.0),
    "scatter_add": lambda table, index: (table * 2).scatter_add(0, index[:, None].expand(-1, 4), table[:3]),
    "index_add": lambda table, index: (table * 2).index_add(0, index, table[:3]),
    "index_put": lambda table, index: (table * 2).index_put((index,), table[:3], accumulate=True),
    "loss": lambda table, index: F.cross_entropy(table.t()[:3], index),
}


FROM_THE_END = ("index", "index_put")
"""Functions for which -1 is the last entry."""


@pytest.mark.parametrize(
    "name, bad", [(name, bad) for name in FUNCTIONS for bad in (7, 8, -1, -3) if bad > 0 or name not in FROM_THE_END]
)
def test_indices_that_nobody_has(name: str, bad: int) -> None:
    """Just behind the end, and in front of the start."""
    model = Indexed(FUNCTIONS[name])
    index = torch.tensor([1, bad, 6])
    with pytest.raises((IndexError, RuntimeError)):
        model(index)
    for seed in range(5):
        split = SimulatedModule(model, Mesh((3,)), lambda program, mesh, seed=seed: seeded_plan(program, mesh, seed))
        with pytest.raises((IndexError, RuntimeError), match=r"out of bounds|out of range"):
            split(index)
