"""Every rule in the table, through the checker, on drawn arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.passes.rules import elementwise, families
from autopar.passes.rules.check import check_rule, node_of
from autopar.passes.rules.table import known_targets, rule_of
from tests.strategies.ops import GENERATORS, Draw

families.load()

PLAIN = {target for name in elementwise.PLAIN for target in elementwise.overloads(name)}


def test_every_op_of_the_table_has_a_generator() -> None:
    """A rule without a generator would be believed, not checked."""
    assert [str(target) for target in known_targets() if target not in GENERATORS] == []


@pytest.mark.parametrize("target", known_targets(), ids=str)
def test_rule_holds(target: Any) -> None:
    """Split, run, combine: equal to the whole, for every choice of the op on one axis and for pairs on two."""
    share = 40 if target in PLAIN else 16
    examples = max(2, settings.default.max_examples // share)  # type: ignore[union-attr]

    @settings(max_examples=examples)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        args, kwargs = GENERATORS[target](Draw(data.draw))
        rule = rule_of(node_of(target, args, kwargs))
        parts = data.draw(st.sampled_from([2, 3, 4, (2, 2), (3, 2)]))
        torch.default_generator.manual_seed(0)
        assert check_rule(target, args, kwargs, rule, parts=parts, most=20) == []

    check()
