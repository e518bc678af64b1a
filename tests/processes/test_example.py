"""The example trains, saves its plan and uses it again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]


def test_train_gpt(tmp_path: Path) -> None:
    """A few steps agree with one process; the second run takes the plan of the first."""
    plan = tmp_path / "plan.json"
    for extra in (["--save-plan", plan], ["--plan", plan]):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [*command, "examples/train_gpt.py", "--steps", "2", *map(str, extra)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "largest relative difference" in done.stdout
