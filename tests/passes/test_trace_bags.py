"""Bags of embeddings as lookups and sums: the same numbers, and something to split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.runtime.verify_ranks import verify_ranks
from tests.strategies.plans import seeded_plan


class Bags(nn.Module):
    """An embedding bag in double precision, and a product after it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(9, 4, **options).double()
        self.last = nn.Linear(4, 3).double()

    def forward(self, *inputs: Tensor) -> Tensor:
        result: Tensor = self.last(self.bag(*inputs)).tanh()
        return result


MATRIX = torch.tensor([[1, 2, 2, 5], [8, 0, 3, 2], [2, 2, 2, 2], [4, 5, 6, 7]])
VECTOR = MATRIX.flatten()
STARTS = torch.tensor([0, 3, 3, 10])


@pytest.mark.parametrize(
    ("options", "inputs"),
    [
        ({"mode": "sum"}, (MATRIX,)),
        ({"mode": "mean", "padding_idx": 2}, (MATRIX,)),
        ({"mode": "sum"}, (MATRIX, None, torch.arange(16.0).double().view(4, 4))),
        ({"mode": "mean"}, (VECTOR, STARTS)),
        ({"mode": "sum", "padding_idx": -7, "include_last_offset": True}, (VECTOR, torch.tensor([0, 5, 9, 16]))),
        ({"mode": "max"}, (MATRIX,)),
    ],
)
def test_bags_under_random_plans(options: dict[str, Any], inputs: tuple[Any, ...]) -> None:
    """Padding, weights, empty bags and offsets: every plan gives eager's outputs and gradients."""
    model = Bags(**options)
    program = annotate(capture(model, inputs))
    whole = "aten._embedding_bag.default" in {str(node.target) for node in program.ops()}
    assert whole == (options["mode"] == "max")
    for seed, sizes in enumerate([(2,), (3,), (2, 2)]):
        verify_ranks(model, program, seeded_plan(program, Mesh(sizes), seed), inputs)
