"""Plans beside recipes: never slower on small models, and what the table says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.program import Program
from benchmarks import plan_quality
from benchmarks.models.transformer import TransformerConfig, build
from benchmarks.plan_quality import CASES, CLUSTERS, Case, bottleneck, compare, price_recipes, solve, table
from benchmarks.recipes import RECIPES
from tests import models
from tests.rotate import todays

FAST = Mesh((4,), ("model",), "h100", ("nvlink4",))
TWO = Mesh((2, 2), ("data", "model"), "h100", ("infiniband_400", "nvlink4"))


WIDE = TransformerConfig(
    2, 1024, 8, 4, 128, 2816, 8192, 512, gated=True, rms_norm=True, rotary=True, tied=False
)  # fmt: skip


def wide() -> Program:
    """Return two layers of a Llama that is wide enough to be worth splitting."""
    model, args = build(WIDE, 16, torch.bfloat16)
    return annotate(capture(model, args, {}))


def small(name: str) -> Program:
    """Return the program of a model that the tests share."""
    model, args, kwargs = models.MODELS[name](dropout=0.1)
    return annotate(capture(model, args, kwargs))


@pytest.mark.parametrize(
    ("name", "mesh", "share"),
    todays(
        [("mlp", FAST, 0.9), ("mlp", TWO, 0.9), ("vit", TWO, None), ("wide", FAST, 0.9)],
        lambda case: case[0] == "mlp",
    ),
)
def test_never_slower_than_the_best_recipe(name: str, mesh: Mesh, share: float | None) -> None:
    """Without a budget, and within a share of what the free plan takes, no recipe that fits costs less."""
    program = wide() if name == "wide" else small(name)
    row = compare(program, mesh, None)
    assert not row["slower"], table({**row, "model": name, "cluster": str(mesh), "budget_bytes": 0})
    if share is not None:
        tight = compare(program, mesh, int(share * row["bytes"]))
        assert not tight["slower"], table({**tight, "model": name, "cluster": str(mesh)})


def test_a_row_says_what_does_not_fit() -> None:
    """A budget below the least possible is a row too, with what is needed."""
    program = annotate(capture(*models.mlp()))
    row = {"model": "mlp", "cluster": "four", **compare(program, FAST, 1000)}
    assert row["why"] == "does not fit" and row["least_bytes"] > 1000
    assert "does not fit" in table(row)


def test_kept_copies_are_gathered_once() -> None:
    """ZeRO-1/2 gathers no parameter in the backward; a byte less than what it keeps, and it does not fit."""
    program = small("mlp")
    recipe = next(recipe for recipe in RECIPES if recipe.title == "ZeRO-1/2")
    kept = solve(program, FAST, None, recipe)
    names = {role.node for role in program.inputs if role.kind == "parameter"}
    gathered = [row.phase for row in kept.collectives if row.kind == "all_gather" and row.tensor in names]
    assert gathered and set(gathered) == {"forward"}
    found = price_recipes(program, FAST, kept.memory.total_bytes - 1)
    assert found["ZeRO-1/2"] == {"why": "does not fit", "least_bytes": kept.memory.total_bytes}
    assert found["ZeRO-3"]["seconds"] >= kept.step_seconds


def test_what_bounds_a_plan() -> None:
    """Compute, or a collective and its axis, with its share."""
    plan = solve(annotate(capture(*models.mlp())), FAST, None)
    name, _, share = bottleneck(plan).rpartition(" ")
    assert (name == "compute" or name.endswith("over model")) and share.endswith("%")


def test_the_table_and_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints a block a row and writes the same rows."""
    pair = lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))  # noqa: E731
    small = Case(pair, (((8,), torch.float32),), 2, torch.float32)
    monkeypatch.setitem(plan_quality.CASES, "llama-1b", small)
    path = tmp_path / "rows.json"
    plan_quality.main(["--model", "llama-1b", "--cluster", "8 h100", "--json", str(path)])
    (row,) = json.loads(path.read_text())["rows"]
    assert row["cluster"] == "8 h100" and set(row["recipes"]) == {recipe.title for recipe in RECIPES}
    told = capsys.readouterr().out
    assert "autopar" in told and f"| llama-1b | {row['ratio']:.2f} {row['best']} |" in told


def test_enough_models_and_clusters() -> None:
    """At least eight models and six meshes, several devices and links."""
    assert len(CASES) >= 8 and len(CLUSTERS) >= 6
    assert len({mesh.device for mesh in CLUSTERS.values()}) >= 4
