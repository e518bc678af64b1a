"""Agreements: errors and differing lines as the other ranks see them; the collectives run in tests/processes."""

from __future__ import annotations

import pytest

from autopar.errors import AutoparError, InfeasibleError, PlanError
from autopar.runtime.agree import _describe, _rebuild, difference, word_of


def test_difference_names_the_first_line() -> None:
    """The first differing line is shown for every rank, a missing one as nothing."""
    assert "rank 0 has b; rank 1 has c" in difference("the call", [["a", "b", "d"], ["a", "c", "e"]])
    assert "rank 0 has nothing; rank 1 has c" in difference("the call", [["a"], ["a", "c"]])
    assert "the same on every rank" in difference("the call", [["a"], ["a"]])


def test_digest_keeps_lines_apart() -> None:
    """Text that moves from one line to the next is another digest."""
    assert word_of(["ab", "c"]) != word_of(["a", "bc"])


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (PlanError("it is cut"), PlanError, "planning failed on rank 3: it is cut"),
        (ValueError("odd"), AutoparError, "planning failed on rank 3: ValueError: odd"),
        (InfeasibleError("too little", 77), InfeasibleError, "too little"),
    ],
)
def test_errors_travel(error: Exception, kind: type[AutoparError], words: str) -> None:
    """An error arrives on the other ranks in its class, with the rank; a foreign one as a plain AutoparError."""
    arrived = _rebuild(3, "planning", _describe(error))
    assert type(arrived) is kind
    assert words in str(arrived)
    assert getattr(arrived, "least_bytes", None) == getattr(error, "least_bytes", None)
