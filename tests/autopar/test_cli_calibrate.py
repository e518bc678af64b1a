"""The command ``autopar calibrate``."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from autopar.cli import app
from autopar.mesh import Mesh
from autopar.passes.cost.devices import device, mesh_links


def test_a_profile_is_written(tmp_path: Path) -> None:
    """The command measures, writes a profile and says what it found; the path is a device name then."""
    path = tmp_path / "here.json"
    result = CliRunner().invoke(app, ["calibrate", str(path), "--seconds", "1"])
    assert result.exit_code == 0, result.output
    assert "GFLOP/s" in result.output
    assert json.loads(path.read_text())["measurements"]["products"]
    assert device(str(path)).name == str(path)
    assert len(mesh_links(Mesh((2,), device=str(path)))) == 1


def test_the_ending_is_checked(tmp_path: Path) -> None:
    """A file that could not be named as a device is refused before anything is measured."""
    result = CliRunner().invoke(app, ["calibrate", str(tmp_path / "here.txt")])
    assert result.exit_code == 2
    assert ".json" in result.output
