"""Finding the model that the command line names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autopar.errors import InputError
from autopar.load_model import load_model

SOURCE = """
import torch
from torch import nn

def pair():
    return nn.Linear(3, 2), (torch.zeros(4, 3),)

def triple():
    return nn.Linear(3, 2), [], {"input": torch.zeros(4, 3)}

def alone():
    return nn.Linear(3, 2)

def wrong():
    return nn.Linear(3, 2), torch.zeros(4, 3)

def fails():
    raise KeyError("the user's own")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with ``case_models.py`` in it."""
    (tmp_path / "case_models.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("case_models", None)
    return tmp_path


@pytest.mark.parametrize("where", ["case_models", "case_models.py", "./case_models.py"])
def test_a_function_of_a_module_or_of_a_file(folder: Path, where: str) -> None:
    """Both forms find it, from the current folder."""
    case = load_model(f"{where}:pair")
    assert [tuple(arg.shape) for arg in case.args] == [(4, 3)] and case.kwargs == {}
    assert list(load_model(f"{where}:triple").kwargs) == ["input"]


def test_a_model_is_built_on_the_device_that_is_asked(folder: Path) -> None:
    """On meta nothing is allocated, neither model nor inputs."""
    case = load_model("case_models:pair", device="meta")
    assert case.args[0].is_meta and all(parameter.is_meta for parameter in case.model.parameters())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("case_models", "names no function; write package.module:function"),
        (":pair", "names no function"),
        ("case_models:", "names no function"),
        ("none.py:pair", "there is no file none.py"),
        ("no_such_module:pair", "there is no module 'no_such_module'"),
        ("case_models.inside:pair", "there is no module 'case_models.inside'"),
        ("case_models:gone", "no function 'gone'; it has alone, fails, pair, triple, wrong"),
        ("case_models:alone", r"returned \(Linear\); it must return \(model, args\)"),
        ("case_models:wrong", r"returned \(Linear, Tensor\)"),
    ],
)
def test_what_is_not_there_is_an_error_that_says_what_to_write(folder: Path, name: str, message: str) -> None:
    """Each wrong name or result has its own message."""
    with pytest.raises(InputError, match=message):
        load_model(name)


def test_errors_of_the_users_own_code_go_through(folder: Path) -> None:
    """A fault in the user's function keeps its traceback."""
    with pytest.raises(KeyError, match="the user's own"):
        load_model("case_models:fails")


def test_a_module_that_misses_another_is_not_called_missing(folder: Path) -> None:
    """The error names the module that is really missing."""
    (folder / "case_broken.py").write_text("import no_such_dependency\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        load_model("case_broken:pair")
