"""Every rule in the table, through the checker, on drawn arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from autopar.passes.improve.memories import may_be_view
from autopar.passes.rules import elementwise, families
from autopar.passes.rules.check import check_rule, eager, node_of
from autopar.passes.rules.table import known_targets, rule_of
from tests.strategies.ops import GENERATORS, Draw

families.load()

PLAIN = {target for name in elementwise.PLAIN for target in elementwise.overloads(name)}


def _lies_in_an_operand(target: Any, args: Any, kwargs: Any) -> bool:
    """Tell whether a result of the op lies in the memory of an operand, or two results in one memory."""
    operands, results = (
        [leaf.untyped_storage().data_ptr() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        for tree in ((args, kwargs), eager(target, *args, **kwargs))
    )
    own = [place for place in results if place != 0]
    return bool(set(own) & set(operands)) or len(set(own)) < len(own)


def test_every_op_of_the_table_has_a_generator() -> None:
    """A rule without a generator would be believed, not checked."""
    assert [str(target) for target in known_targets() if target not in GENERATORS] == []


@pytest.mark.parametrize("target", known_targets(), ids=str)
def test_rule_holds(target: Any) -> None:
    """Split, run, combine: equal to the whole, for every choice of the op on one axis and for pairs on two.

    What the op is not known to return as a view lies in memory of its own: ops may write there.
    """
    share = 40 if target in PLAIN else 16
    examples = max(2, settings.default.max_examples // share)  # type: ignore[union-attr]

    @settings(max_examples=examples)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        args, kwargs = GENERATORS[target](Draw(data.draw))
        node = node_of(target, args, kwargs)
        assert may_be_view(node) or not _lies_in_an_operand(target, args, kwargs)
        rule = rule_of(node)
        parts = data.draw(st.sampled_from([2, 3, 4, (2, 2), (3, 2)]))
        torch.default_generator.manual_seed(0)
        assert check_rule(target, args, kwargs, rule, parts=parts, most=20) == []

    check()
