"""The command line: what it prints, and how it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autopar.cli import main
from autopar.plans import Plan
from tests.autopar.fake_plans import small_plan, two_axis_plan

ROOT = Path(__file__).resolve().parents[2]
CASE = """
import torch
from torch import nn

class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, y):
        return (self.down(torch.relu(self.up(x))) - y).square().sum()

def build():
    return Regression(), (torch.ones(4, 8), torch.zeros(4, 8))
"""


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """Return ``call(*arguments) -> (exit code, stdout, stderr)``, run in a folder with ``case.py`` and two plans."""
    (tmp_path / "case.py").write_text(CASE)
    two_axis_plan().save(tmp_path / "a.json")
    small_plan().save(tmp_path / "b.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["autopar", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def test_show_explain_and_diff_print_what_the_plan_says(call) -> None:  # type: ignore[no-untyped-def]
    """The commands on saved plans print the same text as the methods."""
    plan = Plan.load("a.json")
    assert call("show", "a.json") == (0, f"{plan}\n", "")
    assert call("explain", "a.json", "layers.0.mlp.up") == (0, plan.explain("layers.0.mlp.up") + "\n", "")
    assert call("diff", "a.json", "b.json") == (0, plan.diff(small_plan()) + "\n", "")


def test_plan_shows_and_saves_what_verify_then_confirms(call) -> None:  # type: ignore[no-untyped-def]
    """A model is planned, the plan saved, read and verified; a plan made on the way is verified too."""
    arguments = ("--mesh", "2,2", "--axes", "data,model", "--device", "h100", "--optimizer", "sgd", "--memory", "1GB")
    code, out, err = call("plan", "case.py:build", *arguments, "--save", "plan.json")
    assert (code, err) == (0, "")
    assert "Plan for a mesh of data=2 x model=2 (4 ranks, device h100)" in out and "written to plan.json" in out
    plan = Plan.load("plan.json")
    assert (plan.mesh.sizes, plan.options.optimizer, plan.options.memory) == ((2, 2), "sgd", 10**9)
    assert "up.weight" in plan.parameters
    assert call("verify", "case.py:build", "--plan", "plan.json")[:2] == (0, _confirmed("data=2, model=2, device=h100"))
    assert call("verify", "case:build", "--mesh", "3")[:2] == (0, _confirmed("axis0=3, device=cpu", "case:build"))


def test_a_cluster_is_searched(call) -> None:  # type: ignore[no-untyped-def]
    """``--cluster`` searches the mesh; with ``--mesh`` it is refused."""
    code, out, err = call("plan", "case.py:build", "--cluster", "1x2 h100", "--optimizer", "sgd")
    assert (code, err) == (0, "")
    assert "configurations:" in out or "not searched:" in out
    code, _, err = call("plan", "case.py:build", "--cluster", "1x2 h100", "--mesh", "2")
    assert code == 2 and "give either --mesh SIZES or --cluster TEXT" in err


def test_what_plan_takes_has_an_option(call) -> None:  # type: ignore[no-untyped-def]
    """Stages along a named axis, their schedule and micro-batches, and how a plan is priced are asked for by name."""
    stages = ("--axes", "steps,data", "--pipeline", "steps", "--micro-batches", "2", "--schedule", "gpipe")
    code, _, err = call(
        *("plan", "case.py:build", "--mesh", "2,2", *stages, "--cut", "down", "--save", "plan.json"),
        *("--memory", "1MB", "--at-once", "--overlap", "--disable", "wait_late", "--batch-norm", "per_micro_batch"),
    )
    assert (code, err) == (0, "")
    plan = Plan.load("plan.json")
    assert plan.pipeline is not None
    assert (plan.pipeline.micro_batches, plan.pipeline.schedule, plan.pipeline.ranks) == (2, "gpipe", 2)
    options = plan.options
    assert (options.cuts, options.disable, options.at_once, options.overlap) == (("down",), ("wait_late",), True, True)
    found = call("verify", "case.py:build", "--mesh", "2,2", *stages)
    assert (found[0], found[2]) == (0, "")
    code, _, err = call("plan", "case.py:build", "--cluster", "1x2 h100", "--pipeline", "pp")
    assert code == 2 and "--pipeline names an axis" in err


def _confirmed(mesh: str, name: str = "case.py:build") -> str:
    return f"{name} on Mesh({mesh}): equal to one device\n"


def test_a_model_on_meta_gets_the_same_plan(call) -> None:  # type: ignore[no-untyped-def]
    """Planning touches no data."""
    call("plan", "case.py:build", "--mesh", "2", "--save", "real.json")
    assert call("plan", "case.py:build", "--mesh", "2", "--meta", "--save", "meta.json")[0] == 0
    assert Path("real.json").read_bytes() == Path("meta.json").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "none.json"), "PlanError: the plan file none.json can't be read"),
        (("explain", "a.json", "layers.0.mlp.upp"), "nearest: layers.0.mlp.up"),
        (("plan", "case.py:gone", "--mesh", "2"), "InputError: case.py has no function 'gone'"),
        (("plan", "case.py:build", "--mesh", "two"), "MeshError: 'two' is no mesh"),
        (("plan", "case.py:build", "--mesh", "2", "--axes", "a,b"), "MeshError"),
        (("plan", "case.py:build", "--mesh", "0"), "MeshError"),
        (("plan", "case.py:build", "--mesh", "2", "--device", "abacus"), "MeshError"),
        (("plan", "case.py:build", "--mesh", "2", "--memory", "-1GB"), "OptionError"),
        (("plan", "case.py:build", "--mesh", "2", "--optimizer", "magic"), "OptionError"),
        (("plan", "case.py:build", "--mesh", "2", "--constraint", "up"), "ConstraintError: 'up' is no constraint"),
        (
            ("plan", "case.py:build", "--mesh", "2", "--constraint", "up=row", "--constraint", "up=column"),
            "ConstraintError: 'up' is constrained twice",
        ),
        (("verify", "case.py:build", "--plan", "a.json"), "PlanError"),
    ],
)
def test_errors_are_one_line_and_exit_code_1(call, arguments: tuple[str, ...], message: str) -> None:  # type: ignore[no-untyped-def]
    """No traceback: the kind of the error, what was asked, what to do."""
    code, out, err = call(*arguments)
    assert code == 1 and out == ""
    assert message in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "case.py:build"), "--mesh 2,4"),
        (("verify", "case.py:build"), "either --plan FILE or --mesh SIZES"),
        (("verify", "case.py:build", "--mesh", "2", "--plan", "a.json"), "either --plan FILE or --mesh SIZES"),
        (("teleport",), "No such command"),
    ],
)
def test_a_wrong_call_is_exit_code_2(call, arguments: tuple[str, ...], message: str) -> None:  # type: ignore[no-untyped-def]
    """Usage is told by typer."""
    code, _, err = call(*arguments)
    assert code == 2 and message in " ".join(err.replace("│", " ").split())


def test_help_names_the_commands_without_importing_torch() -> None:
    """``--help`` answers at once, and lists every command."""
    code = (
        "import sys; sys.argv = ['autopar', '--help']\n"
        "from autopar.cli import main\n"
        "try: main()\n"
        "except SystemExit: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in ("plan", "show", "explain", "diff", "verify"))
