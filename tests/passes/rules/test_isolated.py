"""What runs in a process of its own."""

from __future__ import annotations

import os
import signal
import time

import pytest

from autopar.passes.rules.isolated import Crashed, isolated


def test_the_result_comes_back_and_nothing_else() -> None:
    """A large result arrives whole; what the function changes stays in its process."""
    seen: list[int] = []

    def function() -> list[int]:
        seen.append(1)
        return list(range(100_000))

    assert isolated(function) == list(range(100_000))
    assert seen == []


def test_a_crash_is_an_exception() -> None:
    """A signal kills the process alone."""
    with pytest.raises(Crashed, match="its process died"):
        isolated(lambda: os.kill(os.getpid(), signal.SIGSEGV))


def test_a_hang_is_an_exception() -> None:
    """A process that does not end is stopped."""
    with pytest.raises(Crashed, match=r"did not end within 0\.2 s"):
        isolated(lambda: time.sleep(60), limit_s=0.2)
