"""The zoo: a sample of it that changes with the date, and what a row says when something goes wrong."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import random
import time

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import CaptureError, LoweringError, MismatchError
from benchmarks.zoo import ROOT, Prepared, judge, page, plan_best, plan_random, run_case
from benchmarks.zoo_models import load
from benchmarks.zoo_models.case import Built, Case

TODAY = datetime.date.today().toordinal()
REFUSED = {
    "autoformer", "encodec", "fsmt", "ibert", "jetmoe", "nllb-moe", "qwen2-vl", "splinter", "switch-transformers",
    "vilt", "vits", "wav2vec2-ctc", "yolos-loss",
}  # fmt: skip
"""Models with branches or shapes that depend on data."""
CASES = load()
LIGHT = {"text decoder", "text encoder", "tabular", "graph", "physics", "other", "time series"}
SAMPLE = random.Random(TODAY).sample(
    [case.name for case in CASES.values() if case.kind in LIGHT and case.name not in REFUSED], 2
)


@pytest.mark.parametrize("name", SAMPLE)
def test_sample_equals_one_device(name: str) -> None:
    """A case of today by a random legal plan, which splits more than the best one does."""
    package = CASES[name].package
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    row = Prepared(CASES[name]).run((2,), plan_random(TODAY))
    assert row["result"] == "match"


def test_best_plan_of_a_small_case() -> None:
    """The figures of a row: ops that run whole, and a speed-up that splitting must bring on the zoo's device."""
    row = Prepared(CASES["neural_ode"]).run((4,), plan_best)
    assert row["result"] == "match"
    assert 1.5 < row["predicted_speedup"] <= 4.0
    assert 0 <= row["replicated_ops"] < row["ops"]


class Misbehaves(nn.Module):
    """A layer that does something else instead of computing."""

    def __init__(self, deed: str) -> None:
        super().__init__()
        self.layer, self.deed = nn.Linear(4, 4), deed

    def forward(self, x: Tensor) -> Tensor:
        """Do it."""
        if self.deed == "ends":
            os._exit(3)
        while self.deed == "spins":
            time.process_time()
        if self.deed == "branches" and x.sum() > 0:
            return x
        result: Tensor = self.layer(x)
        return result


def _case(deed: str) -> Case:
    def build() -> Built:
        return Misbehaves(deed), (torch.randn(4, 4),), {}

    return Case(deed, "test", "", build)


@pytest.mark.parametrize(
    ("deed", "result", "detail"),
    [("ends", "error", "ended with 3"), ("spins", "hang", "not done after"), ("branches", "refused", "test_zoo.py")],
)
def test_a_crash_and_a_hang_are_rows(deed: str, result: str, detail: str) -> None:
    """Every mesh gets its row, whatever happens to the process."""
    rows = run_case(_case(deed), [(2,), (2, 2)], limit_s=2)
    assert [row["mesh"] for row in rows] == [[2], [2, 2]]
    assert {row["result"] for row in rows} == {result}
    assert detail in rows[0]["detail"]


def test_results_of_errors() -> None:
    """A wrong number, a refusal and a fault of the compiler are three things."""
    assert judge(MismatchError("x"))["result"] == "wrong"
    assert judge(CaptureError("x"))["result"] == "refused"
    assert judge(LoweringError("x"))["result"] == "error"
    assert judge(ZeroDivisionError("x"))["result"] == "error"
    assert judge(ImportError("no timm"))["result"] == "skipped"


def test_page() -> None:
    """A line a case, a cell a mesh, and the reason of what is not equal."""
    head = {"case": "a", "kind": "k", "package": "p", "training": True, "seconds": 1.0}
    rows = [
        {**head, "mesh": [4], "result": "match", "replicated_ops": 3, "predicted_speedup": 2.5},
        {**head, "mesh": [8], "result": "refused", "detail": "CaptureError: line 7"},
        {**head, "mesh": [3], "result": "match", "plan": "random 1", "replicated_ops": 9, "predicted_speedup": None},
    ]
    text = page(rows)
    assert "| k | a | p | training | match, 3 whole, 2.5x |  | refused | match |" in text
    assert "By autopar's plan: 2 runs: 1 match, 1 refused." in text and "- **a**: CaptureError: line 7" in text


def test_the_page_is_that_of_the_rows() -> None:
    """What docs/zoo.md claims are the rows that are kept."""
    rows = json.loads((ROOT / "benchmarks" / "data" / "zoo_rows.json").read_text())["rows"]
    assert (ROOT / "docs" / "zoo.md").read_text() == page(rows) + "\n"


def test_there_are_at_least_sixty_of_many_kinds() -> None:
    """The zoo covers what people bring."""
    kinds = {case.kind for case in CASES.values()}
    assert len(CASES) >= 60
    assert kinds >= {
        "text decoder", "text encoder", "encoder-decoder", "vision", "audio", "multimodal", "diffusion", "state space",
        "mixture of experts", "detection", "time series", "tabular", "graph",
    }  # fmt: skip
