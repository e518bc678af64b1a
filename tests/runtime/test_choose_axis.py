"""An axis that nobody names becomes the pipeline axis where that is predicted to be best, and only there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import InfeasibleError, MeshError
from autopar.passes.search_axes import MARGIN
from tests import models
from tests.rotate import todays

SLOW, FAST = "ethernet_10/8", "nvlink4"
NAMES = ("node", "gpu")


def mesh_of(*links: str, pipeline: str | None = None) -> autopar.Mesh:
    """Return a mesh of two ranks an axis."""
    return autopar.Mesh((2,) * len(links), NAMES[: len(links)], "cpu", links, pipeline)


def plan(mesh: autopar.Mesh, layers: int = 8, **options: Any) -> autopar.Plan:
    """Return the plan of a stack of layers."""
    model, args, _ = models.stack(layers=layers)
    return autopar.plan(model, mesh, args, **options)


def note_of(found: autopar.Plan) -> str:
    """Return why a plan has no stages."""
    assert found.pipeline is None and found.search is not None and not found.search.chosen
    return found.search.note


def test_a_slow_axis_becomes_stages(tmp_path: Path) -> None:
    """The plan keeps the axis's name, tells what was tried, survives its file, and computes what one device does."""
    model, args, _ = models.stack(dropout=0.1)
    found = autopar.plan(model, mesh_of(SLOW, FAST), args)
    assert found.pipeline is not None and found.search is not None
    assert (found.pipeline.name, found.pipeline.axis, found.pipeline.ranks) == ("node", 0, 2)
    assert found.mesh.names == ("gpu",) and found.mesh.links in ((), (FAST,))
    assert found.search.chosen == "node as the pipeline axis"
    assert found.search.considered == found.search.pruned + found.search.solved == 2
    ((_, flat_s),) = found.search.others
    assert found.step_seconds < flat_s * (1 - MARGIN)
    assert "on 2 ranks of node" in str(found) and "2 axes were considered for stages" in str(found)
    found.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded == found
    autopar.verify(model, loaded, args)


def test_a_fast_axis_stays() -> None:
    """Where all links are fast there are no stages; the plan is that of a mesh that rules them out."""
    found = plan(mesh_of(FAST, FAST))
    assert "none saves more than 5 % of the step" in note_of(found)
    out = plan(mesh_of(FAST, FAST, pipeline=""))
    assert out.search is None and out.pipeline is None
    assert found.choices == out.choices and found.cost == out.cost


def test_a_small_model_is_pruned() -> None:
    """A plan near the bound of all work costs nothing more."""
    model, args, _ = models.mlp()
    found = autopar.plan(model, (2, 2), args)
    assert found.search is not None and (found.search.considered, found.search.pruned) == (2, 2)


@pytest.mark.parametrize("links", todays([(SLOW, FAST), (FAST, SLOW), ("ethernet_10", FAST), (SLOW,)], len))
def test_never_slower(links: tuple[str, ...]) -> None:
    """What is chosen is no slower than without stages, and by no more than the margin than stages on a named axis."""
    found = plan(mesh_of(*links), layers=4)
    assert found.step_seconds <= plan(mesh_of(*links, pipeline=""), layers=4).step_seconds
    for name in NAMES[: len(links)]:
        named = plan(mesh_of(*links, pipeline=name), layers=4)
        assert named.pipeline is not None and named.pipeline.name == name
        assert found.step_seconds <= named.step_seconds / (1 - MARGIN)


def test_batch_norm_is_not_cut() -> None:
    """Its statistics are those of the whole batch, so there are no stages, however slow the axis."""
    model, args, _ = models.stack(norm=nn.BatchNorm1d)
    assert "can't be exact" in note_of(autopar.plan(model, mesh_of(SLOW), args))


class Beside(nn.Module):
    """A stack that returns what it predicts beside its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = models.stack(layers=2, width=32)[0]

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": self.stack(x, y), "predicted": self.stack.layers(x)}


def test_what_cannot_be_cut_says_why() -> None:
    """No backward, shares of the batch, outputs that stages would not return: no stages, and the reason."""
    mesh = mesh_of(SLOW)
    model, args, _ = models.stack(layers=2, width=32, batch=32)
    with torch.no_grad():
        assert note_of(autopar.plan(model, mesh, args)) == "no stages: it has no backward"
    assert "inputs='local'" in note_of(autopar.plan(model, mesh, args, inputs="local"))
    assert "all at once" in note_of(autopar.plan(model, mesh, args, outputs="full"))
    assert "one row" in note_of(autopar.plan(model, mesh, tuple(x[:1] for x in args)))
    assert "beside the loss (['predicted']) would be left out" in note_of(autopar.plan(Beside(), mesh, args))
    one = autopar.plan(model, mesh, args, micro_batches=1)
    assert one.search is not None and "one micro-batch is asked for" in one.search.note


def test_what_is_asked_is_kept() -> None:
    """Schedule, cuts and micro-batches hold for whatever axis is taken; a schedule asks for stages."""
    found = plan(mesh_of(FAST, FAST), layers=4, schedule="gpipe", micro_batches=8)
    assert found.pipeline is not None and found.pipeline.ranks == 2
    assert (found.pipeline.schedule, found.pipeline.micro_batches) == ("gpipe", 8)
    assert found.options.schedule == "gpipe" and found.options.cuts == ()
    cut = plan(mesh_of(FAST), layers=4, cuts=("layers.2",))
    assert cut.pipeline is not None and cut.pipeline.cuts == ("layers.2",)


def test_micro_batches_are_kept() -> None:
    """Their number is that of the stages, where an axis becomes stages."""
    few = plan(mesh_of(SLOW, FAST), micro_batches=4)
    assert few.pipeline is not None and few.pipeline.micro_batches == 4


def test_constraints_keep_their_axis() -> None:
    """An axis that a constraint names splits something, so it can't be that of stages."""
    found = plan(mesh_of(SLOW, FAST), constraints={"layers.0.0": "column@node"})
    assert found.pipeline is None or found.pipeline.name == "gpu"
    kept = plan(mesh_of(SLOW, FAST), constraints={"layers.0.0": "column@gpu"})
    assert kept.pipeline is not None and kept.pipeline.name == "node"
    assert kept.strategies["layers.0.0"] == "column over gpu"


def test_stages_that_no_axis_can_have() -> None:
    """They are refused with the reason; on a mesh without an axis of several ranks, as ever."""
    model, args, _ = models.stack(layers=4, norm=nn.BatchNorm1d)
    with pytest.raises(MeshError, match=r"none can be the pipeline axis: node: .* can't be exact"):
        autopar.plan(model, mesh_of(FAST), args, schedule="1f1b")
    with pytest.raises(MeshError, match=r"no axis of .* is called 'pp'; name the pipeline axis so"):
        autopar.plan(model, autopar.Mesh((1,)), args, schedule="1f1b")
    with pytest.raises(MeshError, match=r"pipeline='rows' can't be that of a mesh with axes node, gpu; use one of ''"):
        mesh_of(FAST, FAST, pipeline="rows")
    with pytest.raises(MeshError, match="use one of 'pp'"):
        autopar.Mesh((2, 2), ("pp", "data"), pipeline="data")


def test_memory_asks_for_stages() -> None:
    """A budget that no plan without stages fits has one with stages, or the refusal of the plan without."""
    with pytest.raises(InfeasibleError) as raised:
        plan(mesh_of(FAST, pipeline=""), layers=4, memory=1, optimizer="sgd")
    least = raised.value.least_bytes
    assert least is not None
    found = plan(mesh_of(FAST), layers=4, memory=least - 1, optimizer="sgd")
    assert found.pipeline is not None and found.memory.total_bytes < least
