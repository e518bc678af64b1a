"""Sentences about moves."""

from __future__ import annotations

import pytest

from autopar.mesh import Mesh
from autopar.passes.reasons import move_reason
from autopar.passes.redistribution import arc_between
from autopar.placement import parse_layout


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        ("S0", "R", "gathered over data: wanted whole by up"),
        ("P", "R", "summed over data: wanted whole by up"),
        ("P(max)", "R", "reduced by max over data: wanted whole by up"),
        ("P", "S1", "summed and scattered over data: wanted split along dim 1 by up"),
        ("S0", "S1", "moved from a split of dim 0 over data: wanted split along dim 1 by up"),
        ("R", "S0", "cut over data: wanted split along dim 0 by up"),
    ],
)
def test_every_kind_of_move_has_its_words(source: str, target: str, text: str) -> None:
    """One sentence for each collective."""
    arc = arc_between(parse_layout(source), parse_layout(target))
    assert arc is not None
    assert move_reason(arc, Mesh((2,), ("data",)), "up") == text
