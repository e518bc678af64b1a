"""A model and a cluster in, a plan with its mesh, stages and micro-batches out; and the same numbers as one device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import InfeasibleError, OptionError
from autopar.passes.candidates import Candidate
from autopar.passes.plan_cluster import cluster_mesh
from benchmarks.models.transformer import TransformerConfig, build

SMALL = TransformerConfig(2, 64, 4, 4, 16, 256, 128, 32, tied=False)


def gpt(batch: int = 4) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return a small GPT with inputs."""
    return build(SMALL, batch, torch.float32)


def test_a_text_is_searched() -> None:
    """A text gives a plan that says how it was found, names other configurations, and survives its file."""
    model, args = gpt()
    plan = autopar.plan(model, "1x2 h100", args)
    assert plan.search is not None and plan.search.considered == plan.search.pruned + plan.search.solved
    assert "configurations:" in str(plan) and "pruned by bounds" in str(plan)
    assert autopar.Plan.from_bytes(plan.to_bytes()) == plan
    assert plan.mesh.num_ranks * (plan.pipeline.ranks if plan.pipeline else 1) == 2


def test_asked_stages_run_as_one_device() -> None:
    """A search that is asked for a schedule and micro-batches keeps them, and its plan computes the same numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)))
    x, y = torch.randn(16, 256), torch.randn(16, 256)
    cluster = autopar.Cluster("4x1 cpu", link_between="ethernet_10")
    plan = autopar.plan(
        model, cluster, (x, y), loss=nn.functional.mse_loss, micro_batches=4, memory="1.4MB", optimizer="adamw"
    )
    assert plan.search is not None and plan.search.chosen
    if plan.pipeline is not None:
        assert plan.pipeline.micro_batches == 4
    autopar.verify(model, plan, (x, y), loss=nn.functional.mse_loss)


def test_what_cannot_be_searched_says_why() -> None:
    """Without a backward, or with a batch norm, the plan is that of nodes and devices, and says why."""
    model, args = gpt()
    with torch.no_grad():
        plan = autopar.plan(model, "1x2 h100", args)
    assert plan.search is not None and plan.search.note == "not searched: it has no backward"
    normed = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    plan = autopar.plan(normed, "1x2 h100", (torch.zeros(8, 8), torch.zeros(8, 1)), loss=nn.functional.mse_loss)
    assert plan.search is not None and plan.search.note.startswith("not searched: ")
    assert plan.mesh.names == ("device",)


def test_refusals() -> None:
    """A model that no split holds, and a cut at no region, are said with what to do."""
    model, args = gpt()
    with pytest.raises(InfeasibleError, match="such devices would do"):
        autopar.plan(model, "1x2 h100", args, memory="100KB")
    with pytest.raises(OptionError, match=r"no stage can start at 'layers\.9' in a search; stages start at regions"):
        autopar.plan(model, "1x2 h100", args, cuts=("layers.9",))


def test_mesh_of_a_candidate() -> None:
    """Axes of one rank are left out, and every axis has the link that it uses."""
    hardware = autopar.Cluster("4x8 h100").hardware
    mesh = cluster_mesh(hardware, Candidate(4, 1, (8,), 1, 8))
    assert (mesh.sizes, mesh.names, mesh.links) == ((4, 8), ("pp", "model"), ("infiniband_400", "nvlink4"))
    assert cluster_mesh(hardware, Candidate(1, 32, (), 1, 8)).links == ("nvlink4*8+infiniband_400",)
