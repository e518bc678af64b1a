"""What costs can't be counted for is refused: the error says what is known and how to add it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar

FIGURES: dict[str, Any] = {
    "peak_flops": {"float32": 1e11}, "achievable": 0.8, "memory_bytes_per_s": 1e10, "launch_s": 1e-6,
    "memory_bytes": 10**10, "devices_per_node": 4, "link_inside": "shared_memory", "link_between": "shared_memory",
}  # fmt: skip
LINK = {"latency_s": 1e-5, "bytes_per_s": 1e9}


def planned(mesh: Any, **options: Any) -> autopar.Plan:
    """Plan one layer."""
    return autopar.plan(nn.Linear(8, 8), mesh, torch.zeros(4, 8), **options)


def profile(folder: Path, figures: Any = FIGURES, link: Any = LINK) -> str:
    """Write a profile and return its path, which is a device's name."""
    path = folder / "machine.json"
    path.write_text(json.dumps({"device": figures, "links": {"wire": link}}))
    return str(path)


def test_a_good_profile_of_ones_own(tmp_path: Path) -> None:
    """The path of a file is a device, and ``path:name`` a link of it."""
    path = profile(tmp_path)
    assert planned(autopar.Mesh((2,), device=path, links=(f"{path}:wire",))).step_seconds > 0


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("4x8 h900", ["'h900'", "known are", "h100", "rtx4090", "to add one", "autopar calibrate"]),
        (autopar.Mesh((2,), device="tpu"), ["'tpu'", "known are", "to add one"]),
        (autopar.Mesh((2,), links=("string",)), ["'string'", "known are", "nvlink4", "to add one", ".json:<name>"]),
        (autopar.Mesh((2,), links=("nvlink4*x+ethernet",)), ["inner*ranks+between", "nvlink4*8+infiniband_400"]),
        (autopar.Mesh((2,), device="/no/such/file.json"), ["can't be read", "autopar calibrate"]),
    ],
)
def test_unknown_devices_and_links(mesh: Any, words: list[str]) -> None:
    """A name that no profile has."""
    with pytest.raises(autopar.MeshError) as refused:
        planned(mesh)
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"launch_s": None}, ["launch_s", "None", "positive"]),
        ({"memory_bytes_per_s": 0}, ["memory_bytes_per_s", "is 0", "positive"]),
        ({"achievable": 1.2}, ["achievable", "at most 1"]),
        ({"peak_flops": {"bfloat16": 1e12}}, ["peak_flops", "at least float32"]),
        ({"peak_flops": {"float32": float("inf")}}, ["peak_flops of float32", "finite"]),
        ({"link_inside": "string"}, ["'string'", "known are"]),
    ],
)
def test_impossible_figures(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    """A figure that can't be, by its name and value; JSON has no infinity, and Python's is refused as well."""
    with pytest.raises(autopar.MeshError) as refused:
        planned(autopar.Mesh((2,), device=profile(tmp_path, {**FIGURES, **changes})))
    told = str(refused.value)
    assert all(word in told for word in words) or "no JSON" in told, told


def test_missing_figures(tmp_path: Path) -> None:
    """All that a device or a link lacks are named at once."""
    few = {key: value for key, value in FIGURES.items() if key not in ("launch_s", "memory_bytes")}
    with pytest.raises(autopar.MeshError, match="lacks launch_s, memory_bytes; add them, with their sources"):
        planned(autopar.Mesh((2,), device=profile(tmp_path, few)))
    path = profile(tmp_path, link={"latency_s": 1e-5})
    with pytest.raises(autopar.MeshError, match="lacks bytes_per_s"):
        planned(autopar.Mesh((2,), links=(f"{path}:wire",)))


def test_a_budget_below_the_least() -> None:
    """The budget and the least that has a plan, exact and with units."""
    with pytest.raises(autopar.InfeasibleError) as refused:
        planned((2,), memory="0.5kB")
    told, least = str(refused.value), refused.value.least_bytes
    assert least is not None and least > 500
    assert "fits into 500 bytes a rank" in told and f"{least} bytes" in told and "raise memory=" in told


@pytest.mark.parametrize("optimizer", ["shampoo", "mine{moments=two}"])
def test_an_unknown_optimizer(optimizer: str) -> None:
    """The known ones, and how another one's state is said."""
    with pytest.raises(autopar.OptionError) as refused:
        planned((2,), optimizer=optimizer)
    known = ("adamw", "OptimizerBytes") if "{" not in optimizer else ("moments", "<key>=<count>")
    assert all(word in str(refused.value) for word in known), str(refused.value)
