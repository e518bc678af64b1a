"""The work of causal attention grows along the queries: the last piece of a split has the most."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar.passes.rules import families
from autopar.passes.rules.rule import Factor
from autopar.passes.rules.table import rule_of


def _attention(causal: bool, queries: int = 64, keys: int = 64, offset: int = 0) -> fx.Node:
    graph = fx.Graph()
    shapes = {"q": (2, 4, queries, 8), "k": (2, 4, keys, 8), "v": (2, 4, keys, 8)}
    nodes = []
    for name, shape in shapes.items():
        node = graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, device="meta")
        nodes.append(node)
    node = graph.call_function(torch.ops.autopar.attention.default, (*nodes, None, causal, 0.5, offset))
    node.meta["val"] = (torch.empty(shapes["q"], device="meta"), torch.empty(shapes["q"][:3], device="meta"))
    return node


def _queries(node: fx.Node) -> Factor:
    families.load()
    return rule_of(node).factor("l")


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_the_last_piece_has_the_most_work(parts: int) -> None:
    """Of ``n`` causal queries the last ``n / parts`` see ``(2 parts - 1) / parts^2`` of all pairs, one more at most."""
    share = _queries(_attention(causal=True)).work_share(64 / parts)
    pairs = sum(range(64 - 64 // parts + 1, 65)) / sum(range(1, 65))
    assert share == pytest.approx(pairs, rel=0.02)
    assert share == pytest.approx((2 * parts - 1) / parts**2, rel=0.05)


def test_without_a_causal_mask_the_work_is_even() -> None:
    """Every query sees every key; so do the causal queries of a decoding step that come after all keys."""
    assert _queries(_attention(causal=False)).work_share(16) == 0.25
    assert _queries(_attention(causal=True, queries=16, offset=64)).work_share(4) == 0.25
