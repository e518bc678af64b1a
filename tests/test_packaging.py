"""The one import package: nothing is left out of the wheel, and nothing else lands beside it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {"autopar": "autopar", "passes": "autopar.passes", "runtime": "autopar.runtime"}


def _packages() -> list[str]:
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return list(configuration["packages"])


def _folders() -> set[str]:
    """Return the dotted name of every folder that holds Python files."""
    names = set()
    for folder, package in SOURCES.items():
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.parent.relative_to(ROOT / folder).parts
            if folder == "autopar" and parts[:1] in (("passes",), ("runtime",)):
                continue
            names.add(".".join((package, *parts)))
    return names


def test_every_folder_is_a_declared_package() -> None:
    """A folder of Python files that pyproject does not list would vanish from the wheel."""
    assert _folders() == set(_packages())


def test_every_folder_has_an_init_file() -> None:
    """A folder without ``__init__.py`` would be a namespace package and escape the checks."""
    for folder in SOURCES:
        for file in (ROOT / folder).rglob("*.py"):
            assert (file.parent / "__init__.py").exists(), file


@pytest.mark.parametrize("name", ["passes", "runtime"])
def test_the_bare_names_are_refused(name: str) -> None:
    """``import passes`` from the repository's root says what to import instead."""
    done = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"import autopar.{name}" in done.stderr


def test_the_wheel_has_every_module_and_data_file(tmp_path: Path) -> None:
    """The wheel holds each source file once, under ``autopar``, and nothing beside it."""
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in SOURCES:
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignore)
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, source / file)
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path / "out"),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = (tmp_path / "out").glob("*.whl")
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = set()
    for folder, package in SOURCES.items():
        for path in (source / folder).rglob("*"):
            parts = path.relative_to(source / folder).parts
            if path.is_file() and not (folder == "autopar" and parts[0] in ("passes", "runtime")):
                expected.add("/".join((*package.split("."), *parts)))
    assert found == expected


def test_importing_autopar_does_not_import_the_solver() -> None:
    """A worker that only runs a plan does not pay for the solver."""
    code = (
        "import sys, autopar; autopar.Plan, autopar.Mesh; assert not any(m.startswith('ortools') for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_no_module_hides_a_public_name() -> None:
    """A module called like a public function would take its place once it is imported."""
    import autopar

    modules = {path.stem for path in (ROOT / "autopar").iterdir()}
    assert not modules & set(autopar.__all__)
    for name in autopar.__all__:
        assert callable(getattr(autopar, name)), name
