"""The step benchmark: every way on real processes, what the profiler's events say, the rows."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.run_processes import run_processes
from benchmarks.speed_cases import CASES, Case, Mlp, _sizes, _transformer
from benchmarks.speed_events import Event, read_events
from benchmarks.speed_peers import DDP, FSDP2, FSDP2_KEPT, TENSOR
from benchmarks.speed_pipeline import PIPELINE
from benchmarks.speed_plans import OWN, speed_plans
from benchmarks.speed_race import race
from benchmarks.step_speed import ratio, summary, table

TEXT = Case("gpt-tiny", partial(_transformer, **_sizes(2, 8, 4, 16, 8, 4)), 4, (4,), 8, tokens=True)
SMALL = Case("mlp-tiny", partial(Mlp, 8, 16, 8), 8, (8,))
HOW = {"compiled": False, "optimizer": "fused", "seconds": 0.01}


@pytest.mark.processes
def test_all_ways_train_the_same_model(tmp_path: Path) -> None:
    """Autopar's own plan, every strategy forced, and every peer run; their losses agree; nothing failed."""
    plans, refused = speed_plans(SMALL, 2, "cpu")
    assert not refused
    trace = tmp_path / "steps.json"
    found = run_processes(2, race, SMALL, plans, HOW, trace)[0]
    assert not found.failed
    peers = {DDP, FSDP2, FSDP2_KEPT, TENSOR}
    assert set(found.seconds) == {OWN, *peers, *(f"as {peer}" for peer in peers)}
    assert all(len(times) == found.rounds and min(times) > 0 for times in found.seconds.values())
    assert all(losses == pytest.approx(found.losses[OWN], rel=1e-5) for losses in found.losses.values())
    assert all(num_bytes > 0 for num_bytes in found.peak_bytes.values())
    assert "traceEvents" in trace.read_text()


@pytest.mark.processes
def test_stages_by_hand_and_by_plan() -> None:
    """1F1B by hand, with tied ends, and autopar's stages cut at the same layers train the same model."""
    plans, _ = speed_plans(TEXT, 2, "cpu")
    found = run_processes(2, race, TEXT, {PIPELINE: plans[PIPELINE]}, HOW, None)[0]
    assert not found.failed
    assert found.losses[f"as {PIPELINE}"] == pytest.approx(found.losses[PIPELINE], rel=1e-5)
    assert plans[PIPELINE].pipeline is not None and plans[PIPELINE].pipeline.cuts == ("layers.1",)


def test_parameters_gathered_again_where_the_peer_does() -> None:
    """FSDP2's strategy keeps pieces only; with kept copies the plan saves whole parameters."""
    plans, _ = speed_plans(SMALL, 2, "cpu")
    weight = next(name for name in plans[FSDP2_KEPT].saved if "weight" in name)
    assert plans[FSDP2].parameters == plans[FSDP2_KEPT].parameters
    assert any("S" in layout for layout in plans[FSDP2].parameters.values())
    assert "R" in plans[FSDP2_KEPT].saved[weight]
    assert "R" not in plans[FSDP2].saved.get(weight, ())


def test_hidden_is_what_compute_covers() -> None:
    """Of a collective of 4 s, 1 s lies under an op; the wait hides nothing; Python ran for 1 s; 8 bytes at the most."""
    events = [
        Event("_c10d_functional::all_reduce", 1, 0.0, 1.0),
        Event("aten::clone", 1, 0.2, 0.8),
        Event("gloo:all_reduce", 2, 0.5, 4.5),
        Event("aten::mm", 1, 2.0, 3.0),
        Event("[memory]", 1, 2.0, 2.0, 8),
        Event("[memory]", 1, 2.5, 2.5, -8),
        Event("[memory]", 1, 2.7, 2.7, 4),
        Event("_c10d_functional::wait_tensor", 1, 3.0, 5.0),
    ]
    seen = read_events(events)
    assert seen.collective_s == pytest.approx(4.0)
    assert seen.hidden_s == pytest.approx(1.0)
    assert seen.python_s == pytest.approx(1.0)
    assert seen.peak_bytes == 8
    assert seen.hidden_fraction == pytest.approx(0.25)


def test_ratios_are_of_one_round() -> None:
    """A round that was slow for both counts as its ratio."""
    median, (first, third) = ratio([1.0, 10.0, 3.0], [2.0, 20.0, 3.0])
    assert (median, first, third) == (0.5, 0.5, 0.75)


def test_table_names_what_failed() -> None:
    """A peer that can't run is in the table with its error; the summary counts who is ahead."""
    row = {
        "model": "a", "own_over_best": 0.9, "best_peer": "DDP", "same_over_peer": {"DDP": 1.1}, "hidden_fraction": 0.5,
        "predicted_hidden_fraction": None,
        "peak_bytes": 10**6, "cpu_own_over_best": 0.7,
        "cpu_same_over_peer": {"DDP": 0.8}, "spread": {"own_over_best": [0.8, 1.0]},
        "failed": {"TP": "RuntimeError: no kernel"},
    }  # fmt: skip
    text = table([row])
    assert "TP: RuntimeError: no kernel" in text and "0.90" in text and "DDP 1.10 (0.80)" in text and "50%/-" in text
    found = summary([row, row | {"own_over_best": 1.2}])
    assert found["own_ahead"] == "1 of 2"
    assert found["own_over_best"] == {"median": pytest.approx(1.05), "worst": 1.2}


def test_six_families_in_two_sizes() -> None:
    """The families that are asked for, each with inputs that its model takes."""
    families = [case.name.partition("-")[0] for case in CASES]
    assert {name: families.count(name) for name in families} == dict.fromkeys(
        ("gpt", "llama", "bert", "vit", "resnet", "mlp"), 2
    )
    for case in CASES:
        assert all(x.shape[0] == case.batch for x in case.make_inputs())
        assert torch.equal(case.make_inputs()[0], case.make_inputs()[0])


def test_data_parallel_reduces_gradients_only() -> None:
    """The same strategy as DDP moves gradients and the loss, no activation."""
    plans, _ = speed_plans(TEXT, 2, "cpu")
    kinds = {(row.kind, row.phase) for row in plans[DDP].collectives}
    assert kinds == {("all_reduce", "backward"), ("all_reduce", "forward")}
    reduced = [row for row in plans[DDP].collectives if row.phase == "backward"]
    assert len(reduced) == len(list(TEXT.make_model().parameters())), "one a parameter; the tied pair is one"
