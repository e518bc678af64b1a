"""Masks, counts and tables whose numbers of elements nobody needs to know."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.mesh import Mesh
from autopar.passes.capture import capture
from autopar.runtime.simulated_module import SimulatedModule
from tests.strategies.plans import seeded_plan
from tests.verified import Around, verified, verified_function


def row_for_a_mask(x: Tensor) -> Tensor:
    y = x.clone()
    y[x[:, 0] > 0] = x[0] * 2
    y[x[:, 1] > 0, :] = x[1:2]
    return y.square()


def number_for_a_mask(x: Tensor) -> Tensor:
    y = x.clone()
    y[x > 0] = x[0, 0]
    y[:, :3][x[:, :3] < -1] = x.sum()
    return y.square()


def values_for_a_constant_mask(x: Tensor) -> Tensor:
    y = x.clone()
    y[torch.ones(4, 6).tril().bool()] = x.flatten()[:10]
    return y.square()


def counts(x: Tensor) -> Tensor:
    which = (x > 0).sum(1)
    weighted = torch.bincount(which, weights=x[:, 0].detach().abs(), minlength=7)
    return x * torch.bincount(which, minlength=7)[:6] + weighted[1:]


def pairs(x: Tensor) -> Tensor:
    twice = torch.combinations(x[:, 0], with_replacement=True)
    return torch.combinations(x[0]).prod(1).sum() + twice.pow(3).sum() + torch.combinations(x[1], r=3).prod(1).sum()


@pytest.mark.parametrize(
    "function", [row_for_a_mask, number_for_a_mask, values_for_a_constant_mask, counts, pairs], ids=lambda f: f.__name__
)
def test_masks_and_counts(function: Callable[[Tensor], Tensor]) -> None:
    """Writes at masks of data, by rows and by numbers, and counts of a given length."""
    verified_function(function)


def test_counts_beyond_their_length_raise() -> None:
    """``minlength`` is a lower bound for torch; a program has that many, and says so when a value is beyond."""
    model = Around(lambda x: x * torch.bincount((x[:, 0] * 0 + 9).long(), minlength=6)[:6])
    x = torch.randn(4, 6, dtype=torch.float64)
    for seed in range(3):
        split = SimulatedModule(model, Mesh((2,)), lambda program, mesh, seed=seed: seeded_plan(program, mesh, seed))
        with pytest.raises((IndexError, RuntimeError), match=r"out of bounds|out of range"):
            split(x)


def test_sparse_embeddings_get_dense_gradients() -> None:
    """Of the same numbers: a shard of a table has no use for a list of rows."""
    model = nn.Sequential(nn.Embedding(7, 6, sparse=True, padding_idx=1), nn.Linear(6, 2)).double()
    program = capture(model, (torch.tensor([1, 3, 3, 6]),))
    assert [role.node is not None for role in program.outputs if role.kind == "gradient"] == [True] * 3
    dense = nn.Sequential(nn.Embedding(7, 6, padding_idx=1), nn.Linear(6, 2)).double()
    dense.load_state_dict(model.state_dict())
    ids = torch.tensor([1, 3, 3, 6])
    split = SimulatedModule(model, Mesh((2,)), lambda program, mesh: seeded_plan(program, mesh, 1))
    split(ids).square().sum().backward()
    dense(ids).square().sum().backward()
    gradients = [model[0].weight.grad, dense[0].weight.grad]
    torch.testing.assert_close(*gradients)
    verified(dense, (ids,), meshes=((3,),))


def test_bounds_and_lists_of_constants() -> None:
    """Slices, lists, arrays and repeats of constants that are computed in the forward."""

    def run(x: Tensor) -> Tensor:
        ends = torch.arange(4)
        rows = sum(x[i] for i in ends.tolist())
        scale = torch.from_numpy(torch.arange(6.0).numpy()).to(x.dtype)
        repeats = x.repeat_interleave(ends, 0)
        return x[: ends.max()].square().sum() + (rows * scale).square().sum() + repeats.pow(3).sum() + F.relu(x).sum()

    verified_function(run)
