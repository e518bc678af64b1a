"""A model that writes into an input changes the caller's tensor, as on one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import InputError, OptionError
from autopar.mesh import Mesh
from autopar.passes.pipeline import make_plan
from autopar.plans import Options
from autopar.runtime.simulated_module import SimulatedModule
from tests.verified import verified


class Masks(nn.Module):
    """A language model's loss that masks padding in the labels it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        labels[labels == 0] = -100
        return F.cross_entropy(self.head(self.table(ids)).flatten(0, 1), labels.flatten())


def inputs() -> tuple[Tensor, Tensor]:
    """Return tokens and labels, some of which are padding."""
    torch.manual_seed(0)
    return torch.randint(0, 9, (4, 6)), torch.randint(0, 3, (4, 6))


def test_plans_equal_one_device() -> None:
    """Loss, gradients and the new labels, by random plans."""
    program = verified(Masks(), inputs())
    assert [(role.kind, role.name) for role in program.outputs][-1] == ("buffer", "args[1]")


def test_the_callers_tensor_changes() -> None:
    """The labels are masked in place; an input that shares their memory would change unseen, and is refused."""
    ids, labels = inputs()
    expected = labels.masked_fill(labels == 0, -100)
    model = SimulatedModule(Masks(), Mesh((2,)), lambda program, mesh: make_plan(program, mesh, Options()))
    model(ids, labels).backward()
    assert torch.equal(labels, expected)
    whole = torch.randint(0, 9, (8, 6))
    with pytest.raises(InputError, match="input tensor number 1, which shares its memory with number 0: pass a copy"):
        model(whole[:4], whole[4:])


def test_micro_batches() -> None:
    """A micro-batch has a part of the input, so a write into it is refused."""
    with pytest.raises(OptionError, match=r"writes into its input args\[1\], of which micro-batches have a part each"):
        autopar.plan(Masks(), 2, inputs(), micro_batches=2)
