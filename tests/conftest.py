"""Settings of the whole test run.

Hypothesis profiles: ``default`` draws the same examples in every run; ``--hypothesis-profile=deep`` draws thousands of
fresh ones. A test that needs more examples than the profile says multiplies ``settings.default.max_examples``, so that
both profiles scale it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

_SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)

settings.register_profile(
    "default", max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=_SLOW
)
settings.register_profile(
    "deep", max_examples=3000, deadline=None, derandomize=False, print_blob=True, suppress_health_check=_SLOW
)
settings.load_profile("default")

torch.set_num_threads(1)

GOLDENS = Path(__file__).resolve().parent / "goldens"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--update-goldens``, which writes what tests see instead of comparing it."""
    parser.addoption("--update-goldens", action="store_true", help="write the golden files anew")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return ``golden(name, text)``: ``text`` must be what ``tests/goldens/<name>`` holds."""

    def compare(name: str, text: str) -> None:
        file = GOLDENS / name
        if request.config.getoption("--update-goldens"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
        assert file.read_text() == text + "\n", f"{name} differs; if it should, run pytest --update-goldens"

    return compare
