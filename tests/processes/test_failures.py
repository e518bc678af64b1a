"""A rank that fails in a step ends the others within seconds, with its error in the output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("where", "words"), [("forward", "boom before the forward"), ("kill", "SIGKILL")])
def test_failing_rank(where: str, words: str) -> None:
    """Nobody waits for a rank that raised or was killed: all end long before any timeout of a collective."""
    done = start("failing_script.py", 2, where)
    assert done.returncode != 0
    assert words in done.stdout + done.stderr
    assert "finished" not in done.stdout


def test_failing_stage() -> None:
    """A stage that fails in a micro-batch ends the stages before and after it, which wait for its messages."""
    done = start("failing_stage.py", 3)
    assert done.returncode != 0
    assert "boom in a stage" in done.stdout + done.stderr
    assert "finished" not in done.stdout


def start(script: str, size: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script of this folder under torchrun; the timeout is far below that of any collective."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*command, str(Path(__file__).with_name(script)), *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
