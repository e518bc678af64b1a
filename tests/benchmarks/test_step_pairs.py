"""Predicted against measured steps: the plans that are run, a run on real processes, and the statistics."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from autopar.mesh import Mesh
from autopar.passes.program import Program
from benchmarks import step_pairs
from benchmarks.step_pairs import MODELS, RANKS, measure_steps, plans, programs, run_ranks, summary, table

MESH = Mesh((RANKS,), ("ranks",), "cpu", ("shared_memory",))


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    """Return the program of a small MLP, the only model."""
    small = (partial(step_pairs.Mlp, 8, 16), (((8, 8), torch.float32),))
    monkeypatch.setattr(step_pairs, "MODELS", {"mlp": small})
    return programs()["mlp"]


def test_plans_differ(program: Program) -> None:
    """Autopar's own comes first; no two are the same; the usual recipes are among them."""
    found = plans(program, MESH)
    assert next(iter(found)) == "autopar"
    assert {"DDP", "ZeRO-1/2", "Megatron"} <= set(found) | {"autopar"}
    assert "ZeRO-3" not in found, "without a budget it keeps what it gathered, as ZeRO-1/2 does"
    assert "Megatron + sequence" not in found
    layouts = [(str(plan.choices), str(plan.routes)) for plan in found.values()]
    assert len(set(layouts)) == len(layouts)


@pytest.mark.processes
def test_steps_run_on_real_processes(program: Program) -> None:
    """Every rank returns the seconds of every pair in every round."""
    pairs = [(program, plan) for plan in plans(program, MESH).values()]
    found = run_ranks(measure_steps, pairs, 2)
    assert len(found) == RANKS
    assert all(len(turns) == 2 and all(len(turn) == len(pairs) for turn in turns) for turns in found)
    assert all(seconds > 0 for turns in found for turn in turns for seconds in turn)


def test_statistics_and_table() -> None:
    """The correlation is over all pairs, and within the models that have enough."""
    rows = [
        {"model": name, "plan": str(i), "predicted_s": p, "measured_s": m, "compute_s": p, "collectives": 1}
        for name, pairs in {"a": [(1, 2), (2, 3), (3, 1)], "b": [(10, 20), (20, 30), (30, 40)]}.items()
        for i, (p, m) in enumerate(pairs)
    ]
    found = summary(rows)
    assert found["within_models"] == pytest.approx((-0.5 + 1.0) / 2)
    assert found["spearman"] is not None and 0.8 < found["spearman"] < 1
    assert len(table(rows).splitlines()) == 7


def test_enough_models() -> None:
    """Five models, which with their recipes make far more than twelve pairs."""
    assert len(MODELS) >= 5
