"""Cuts on a mesh with a pipeline axis: where the schedule takes least time, or anywhere when there are few regions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autopar
from autopar.passes.choose_cuts import choose_cuts
from autopar.passes.pipeline_plan import choose_pipeline, cut_program, stage_mesh
from autopar.plans import Options
from autopar.runtime.shadow import Source
from autopar.runtime.signature import take_apart


def cuts_of(model: nn.Module, width: int, mesh: autopar.Mesh, **asked: str) -> tuple[str, ...]:
    """Return the cuts of a model with a mean square loss and micro-batches of two rows."""
    options = Options(micro_batches=4, **asked)
    source = Source.of(model, nn.functional.mse_loss)
    inputs = take_apart(model, (torch.zeros(8, width), torch.zeros(8, width)), {}, device=None)
    program = source.capture(inputs, stage_mesh(mesh), "global")
    record = choose_pipeline(program, mesh, options)
    return choose_cuts(cut_program(program, record, "auto"), mesh, record, options)


def test_unequal_layers_are_weighed() -> None:
    """The wide layers at the end get a stage of their own, though most layers are before them."""
    narrow = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)]
    wide = nn.Sequential(nn.Linear(64, 4096), nn.Tanh(), nn.Linear(4096, 64))
    assert cuts_of(nn.Sequential(*narrow, wide), 64, autopar.Mesh((2,), ("pp",))) == ("6",)


def test_interleaved_stages() -> None:
    """Interleaved schedules get two stages a rank."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
    assert len(cuts_of(model, 64, autopar.Mesh((2,), ("pp",)), schedule="interleaved_1f1b")) == 3


def test_one_region_is_cut_between_ops() -> None:
    """A model of one module is cut between its ops."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.first).relu() @ self.second

    assert len(cuts_of(Plain(), 8, autopar.Mesh((2,), ("pp",)))) == 1
