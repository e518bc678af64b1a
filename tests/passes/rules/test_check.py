"""The checker refuses what is wrong: each wrong rule is a plausible mistake."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autopar.passes.rules import families
from autopar.passes.rules.check import check_rule, combine, node_of, split_tensor
from autopar.passes.rules.rule import Factor, Rule
from autopar.passes.rules.table import rule_of
from autopar.placement import PARTIAL

families.load()

aten = torch.ops.aten


def _faults(target: Any, args: tuple[Any, ...], rule: Rule, parts: int | tuple[int, int] = 2) -> list[str]:
    return check_rule(target, args, {}, rule, parts=parts)


def test_a_softmax_split_along_its_dim_is_refused() -> None:
    """The pieces of a normalised dim are not normalised together."""
    rule = Rule((Factor("d0", 4),), (("d0",),), (("d0",),))
    assert _faults(aten._softmax.default, (torch.randn(4), 0, False), rule)


def test_a_partial_sum_through_a_nonlinear_op_is_refused() -> None:
    """The sum of exponentials is not the exponential of the sum."""
    assert _faults(aten.exp.default, (torch.randn(4),), Rule((), ((None,),), ((None,),), linear=((0,),)))


def test_a_reduction_called_parallel_is_refused() -> None:
    """A summed dim that the result does not index leaves a partial value, not equal ones."""
    rule = Rule((Factor("k", 4),), (("k",),), ((),), same=(("k", 0),))
    assert "should hold the same" in _faults(aten.sum.default, (torch.randn(4),), rule)[0]


def test_a_bias_added_by_every_rank_is_refused() -> None:
    """A split of the summed dim counts the addend once only with the local rewrite."""
    args = (torch.randn(3), torch.randn(2, 4), torch.randn(4, 3))
    rule = rule_of(node_of(aten.addmm.default, args))
    assert _faults(aten.addmm.default, args, rule) == []
    assert _faults(aten.addmm.default, args, replace(rule, localize=None))


def test_an_uneven_cut_of_a_merged_dim_is_refused() -> None:
    """Three rows of four elements cut by two are not twelve elements cut by two."""
    args = (torch.randn(3, 4), [12])
    rule = rule_of(node_of(aten.view.default, args))
    assert [factor.even for factor in rule.factors] == [True]
    wrong = replace(rule, factors=(replace(rule.factors[0], even=False),))
    assert _faults(aten.view.default, args, wrong)


def test_causal_attention_without_its_offset_is_refused() -> None:
    """Later queries see more keys."""
    q = torch.randn(1, 2, 4, 3)
    args = (q, q, q, None, True, 1.0, 0)
    rule = rule_of(node_of(torch.ops.autopar.attention.default, args))
    assert _faults(torch.ops.autopar.attention.default, args, rule) == []
    assert _faults(torch.ops.autopar.attention.default, args, replace(rule, localize=None))


def test_an_op_that_raises_on_a_piece_is_a_fault() -> None:
    """The fault carries the op's own words."""
    rule = Rule((Factor("d0", 4),), (("d0",), (None,)), (("d0",),))
    assert "RuntimeError" in _faults(aten.mul.Tensor, (torch.randn(4), torch.randn(4)), rule)[0]


def test_split_and_combine_are_inverse() -> None:
    """Nested uneven cuts and partial terms come together again."""
    whole = torch.randn(7, 5, dtype=torch.float64)
    for layout in [(0, 0), (1, 0), (PARTIAL["sum"], 1), (PARTIAL["max"], PARTIAL["max"]), (-1, PARTIAL["product"])]:
        found, fault = combine(split_tensor(whole, layout, (2, 3)), layout, 1e-12)
        assert not fault
        torch.testing.assert_close(found, whole)


def test_pieces_have_memory_of_their_own() -> None:
    """An op that looks past its operand must not find the other pieces there, and pass for one that can be split."""
    x = torch.randn(8)
    rule = Rule((Factor("f", 8, "sum"),), (("f",),), ((None,),))
    assert check_rule(torch.ops.aten.as_strided.default, (x, [8], [1], 0), {}, rule, parts=2) != []
