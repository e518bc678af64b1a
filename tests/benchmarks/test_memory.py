"""The memory benchmark: its rows, and that memory falls with the ranks as the formulas say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autopar.passes.cost.memory import parameter_bytes
from autopar.runtime.measure_memory import state_tensors
from benchmarks.memory import MixedAdamW, main


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every row predicts what it measures; ZeRO-3 takes 16 / N bytes a parameter, ZeRO-1 4 + 12 / N and its pieces."""
    main(["--model", "mlp", "--ranks", "2", "--depth", "6", "--width", "64", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {row["plan"] for row in rows["models"]} >= {"best", "zero0", "zero3"}
    measured = [row for row in rows["models"] + rows["zero"] if "error" in row]
    assert len(measured) >= 3 + 2 * 4
    assert all(abs(row["error"]) <= 0.05 for row in measured)
    whole = [row["bytes_per_parameter"] for row in rows["zero"] if row["plan"] == "zero0"]
    assert all(found == pytest.approx(16, rel=0.05) for found in whole)
    for row in rows["zero"]:
        if row["plan"] == "zero1" and row["ranks"] > 1:
            assert row["bytes_per_parameter"] == pytest.approx(row["formula"] + 2 / row["ranks"], rel=0.05)
        if row["plan"] == "zero3" and row["ranks"] <= 4:
            assert row["bytes_per_parameter"] == pytest.approx(16 / row["ranks"], rel=0.15)
    assert "worst error" in capsys.readouterr().out


def test_mixed_adamw_keeps_what_the_model_counts() -> None:
    """Masters and moments in float32; they add up steps that are too small for 16 bits alone."""
    parameter = torch.ones(100, 10, dtype=torch.bfloat16)
    parameter.grad = torch.ones_like(parameter)
    optimizer = MixedAdamW([parameter])
    optimizer.step()
    assert torch.equal(parameter, torch.ones_like(parameter))
    for _ in range(9):
        optimizer.step()
    kept = sum(tensor.nbytes for tensor in state_tensors(optimizer))
    assert kept == parameter_bytes(1000, 2, True, "adamw-mixed").optimizer
    assert not torch.equal(parameter, torch.ones_like(parameter))
