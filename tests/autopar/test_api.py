"""``autopar.plan``: no processes, no data, and errors that say what to do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import autopar
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
