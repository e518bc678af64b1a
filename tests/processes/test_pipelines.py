"""Stages on real gloo processes: what one process trains, with every schedule, on meshes of two and three axes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.processes import pipelines
from tests.processes.pool import Pool
from tests.rotate import todays

pytestmark = pytest.mark.processes
Pools = Callable[[int], Pool]

TOLERANCE = 1e-4

CASES: list[tuple[str, tuple[str, ...], tuple[int, ...], float, dict[str, Any]]] = [
    ("mlp", ("data",), (2,), 0.1, {"micro_batches": 4}),
    ("mlp", ("pp",), (2,), 0.1, {}),
    ("gpt2", ("pp", "data"), (2, 2), 0.1, {"micro_batches": 4}),
    ("llama", ("pp",), (2,), 0.0, {"micro_batches": 4, "schedule": "zero_bubble"}),
    ("bert", ("data", "pp"), (2, 2), 0.1, {"micro_batches": 2, "schedule": "gpipe"}),
    ("vit", ("pp",), (4,), 0.1, {"micro_batches": 2}),
    ("resnet", ("pp", "data"), (2, 2), 0.0, {"micro_batches": 1}),
]


@pytest.mark.parametrize(("name", "axes", "sizes", "dropout", "options"), todays(CASES, lambda case: case[1], more=1))
def test_training(
    pool: Pools, name: str, axes: tuple[str, ...], sizes: tuple[int, ...], dropout: float, options: dict[str, Any]
) -> None:
    """Three clipped steps are those of one process; every rank keeps its own stages' parameters alone."""
    size = 1
    for n in sizes:
        size *= n
    results = pool(size).run(pipelines.train, name, axes, sizes, dropout, options)
    check(results, "pp" in axes)


def check(results: list[dict[str, Any]], staged: bool) -> None:
    """Assert what every training run must come to."""
    first = results[0]
    for result in results:
        for ours, expected in zip(result["ours"], first["expected"], strict=True):
            assert ours == pytest.approx(expected, rel=TOLERANCE)
    assert {what: error for what, error in first["errors"].items() if not error[0] < TOLERANCE} == {}
    assert first["keys"]
    everything = {name for result in results for name in result["kept"]}
    assert everything == set(first["all"])
    if staged:
        assert all(len(result["kept"]) < len(everything) for result in results)


THREE_AXES: list[tuple[str, float, dict[str, str]]] = [
    (
        "llama",
        0.0,
        {
            "model.layers.*.mlp.up_proj": "column@model;batch@data",
            "model.layers.*.mlp.down_proj": "row@model;batch@data",
        },
    ),
    ("gpt2", 0.1, {}),
    ("t5", 0.1, {}),
    ("unet", 0.1, {"down.*.conv1": "batch@data;channel@model", "up.*.conv1": "batch@data"}),
    ("tied", 0.1, {"layers.*.linear1": "column@model;batch@data", "embed": "vocab@model"}),
]


def test_three_axes(pool: Pools) -> None:
    """Two stages of two by two ranks: rows, columns, channels and vocabularies split inside; another model a day."""
    for name, dropout, constraints in todays(THREE_AXES, lambda case: "any"):
        options = {"micro_batches": 2, "constraints": constraints}
        results = pool(8).run(pipelines.train, name, ("pp", "data", "model"), (2, 2, 2), dropout, options)
        check(results, staged=True)


def test_modes_and_shapes(pool: Pools) -> None:
    """Eval of a batch that the micro-batches do not divide, training on, and a state that is loaded back."""
    for what, (found, expected) in pool(2).run(pipelines.modes_and_shapes)[0].items():
        assert found == pytest.approx(expected, rel=TOLERANCE), what


@pytest.mark.parametrize("options", [{"micro_batches": 2}, {"micro_batches": 4, "cuts": ["down2", "middle", "up2"]}])
def test_a_model_without_a_loss(pool: Pools, options: dict[str, Any]) -> None:
    """Skips over stages, an output without a gradient, a stage without parameters, a backward that comes later."""
    for result in pool(4 if "cuts" in options else 2).run(pipelines.skips, options):
        assert {what: error for what, error in result["errors"].items() if not error[0] < TOLERANCE} == {}
        assert "ran already" in result["refused"]


def test_a_cluster_is_searched_and_run(pool: Pools) -> None:
    """One call takes a model and a cluster; the plan that it finds runs, and applies again without a search."""
    first = pool(2).run(pipelines.on_cluster, "gpt2", "1x2 cpu")[0]
    assert first["considered"] > 1
    assert first["losses"] == pytest.approx(first["expected"], rel=TOLERANCE)


def test_shares_of_the_batch(pool: Pools) -> None:
    """Each replica passes its own rows, every stage of it the same ones; the mesh is torch's."""
    results = pool(4).run(pipelines.local_shares)
    for result in results:
        for ours, expected in zip(result["ours"], results[0]["expected"], strict=True):
            assert ours == pytest.approx(expected, rel=TOLERANCE)


def test_an_axis_becomes_stages(pool: Pools, tmp_path: Path) -> None:
    """A slow axis that nobody named carries stages: what one process trains, also by the saved plan on torch's mesh."""
    results = pool(4).run(pipelines.chosen_axis, str(tmp_path))
    first = results[0]
    for result in results:
        assert result["record"] == ("node", 2) and result["second"][1] == "node"
        for run in ("ours", "given", "unnamed"):
            for ours, expected in zip(result[run], first["expected"], strict=True):
                assert ours == pytest.approx(expected, rel=TOLERANCE)
        assert result["second"][0] == pytest.approx(first["second_expected"], rel=TOLERANCE)
        assert 0 < len(result["kept"]) < len(first["all"])
    assert first["error"][0] < TOLERANCE
    assert len(first["warned"]) == 1 and "clip_grad_norm_" in first["warned"][0]
