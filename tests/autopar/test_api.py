"""``autopar.plan``: no processes, no data, and errors that say what to do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.report.text import format_bytes
from tests import models


def test_plan_needs_no_processes() -> None:
    """A model on meta is planned for a mesh that does not exist, and gives the plan of the real model."""
    model, args, kwargs = models.mlp()
    real = autopar.plan(model, (2, 2), args, kwargs)
    on_meta = autopar.plan(model.to("meta"), autopar.Mesh((2, 2)), tuple(a.to("meta") for a in args), kwargs)
    assert not dist.is_initialized()
    assert on_meta.to_bytes() == real.to_bytes()
    assert real.mesh.sizes == (2, 2)


def test_plan_follows_the_gradient_mode() -> None:
    """Without gradients the plan has no backward, and is for another program."""
    model, args, _ = models.mlp()
    trained = autopar.plan(model, 2, args)
    with torch.no_grad():
        applied = autopar.plan(model.eval(), 2, args)
    assert len(applied.choices) < len(trained.choices)
    assert applied.fingerprint != trained.fingerprint


def test_plan_takes_single_inputs_dicts_and_losses() -> None:
    """A single tensor, a dict of keyword inputs and a loss behind the module are taken; the module is not changed."""
    model = nn.Linear(4, 4)
    single = autopar.plan(model, 2, torch.zeros(8, 4))
    named = autopar.plan(model, 2, {"input": torch.zeros(8, 4)})
    lossy = autopar.plan(model, 2, (torch.zeros(8, 4), torch.zeros(8, dtype=torch.long)), loss=F.cross_entropy)
    assert len({single.fingerprint, named.fingerprint, lossy.fingerprint}) == 3
    assert type(model) is nn.Linear


def test_plan_of_shares() -> None:
    """With local inputs the example is a share, and the plan is for the global batch."""
    model = nn.Linear(4, 4)
    shares = autopar.plan(model, (2, 2), torch.zeros(4, 4), inputs="local")
    whole = autopar.plan(model, (2, 2), torch.zeros(8, 4))
    assert shares.fingerprint == whole.fingerprint
    assert list(shares.inputs.values()) == ["S0,R"]
    assert list(whole.inputs.values()) == ["R,R"]


def test_loss_needs_its_targets() -> None:
    """A call with too few inputs for the loss says how they are taken."""
    with pytest.raises(autopar.InputError, match="1 targets from the end"):
        autopar.plan(nn.Linear(4, 4), 2, (), {"input": torch.zeros(8, 4)}, loss=F.cross_entropy)


def test_parallelize_needs_processes() -> None:
    """Without a process group the error says how to start one."""
    with pytest.raises(autopar.MeshError, match="torchrun"):
        autopar.parallelize(nn.Linear(4, 4), 2, torch.zeros(8, 4))


@pytest.mark.parametrize("sizes", [(2,), (2, 2), (3,)])
def test_the_least_memory_works_and_one_byte_less_is_refused(sizes: tuple[int, ...]) -> None:
    """The error names the least budget, as text and as a number; its plan is right and splits parameters."""
    model, args, _ = models.mlp(width=24, hidden=48)
    with pytest.raises(autopar.InfeasibleError) as refused:
        autopar.plan(model, sizes, args, memory=1)
    least = refused.value.least_bytes
    assert least is not None and f"{least} bytes ({format_bytes(least)})" in str(refused.value)
    assert "fits into 1 byte a rank" in str(refused.value)
    plan = autopar.plan(model, sizes, args, memory=least)
    assert plan.memory_bytes <= least
    assert any(placement.is_shard() for placements in plan.placements.values() for placement in placements)
    autopar.verify(model, plan, args)
    with pytest.raises(autopar.InfeasibleError, match=str(least)):
        autopar.plan(model, sizes, args, memory=least - 1, micro_batches=1)


def test_the_planner_takes_micro_batches_when_memory_asks_for_them() -> None:
    """As few as fit: one less does not; the plan's bytes are those of one, and it is exact."""
    model, args, _ = models.mlp(width=24, hidden=48)
    with pytest.raises(autopar.InfeasibleError) as refused:
        autopar.plan(model, 2, args, memory=1, micro_batches=1)
    least = refused.value.least_bytes
    assert least is not None
    plan = autopar.plan(model, 2, args, memory=least - 1)
    assert plan.pipeline is not None and plan.pipeline.micro_batches == 2
    assert plan.memory_bytes < least
    autopar.verify(model, plan, args)


class HeadsAndVocabulary(nn.Module):
    """Six heads of four channels between a tied table of a prime number of words."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50257, 24)
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of the next word."""
        x = self.table(ids)
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 6, 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        logits = x[:, :-1] @ self.table.weight.T
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize(
    ("sizes", "constraints"),
    [
        ((4,), {}),
        ((4,), {"table.weight": "S0"}),
        ((4,), {"qkv": "column", "out": "row"}),
        ((2, 2), {"table.weight": "S0,R"}),
    ],
)
def test_sizes_that_do_not_divide(sizes: tuple[int, ...], constraints: dict[str, str]) -> None:
    """Vocabulary 50257, batch 3 and 6 heads on 4 ranks: uneven pieces where they are asked for, and right numbers."""
    torch.manual_seed(0)
    model, ids = HeadsAndVocabulary(), torch.randint(0, 50257, (3, 5))
    plan = autopar.plan(model, sizes, ids, constraints=constraints)
    autopar.verify(model, plan, ids)
