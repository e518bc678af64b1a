"""Attention kept whole: batch, heads and queries are parallel; keys and values are read whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.passes import ops as _ops  # noqa: F401  (defines torch.ops.autopar)
from autopar.passes.rules.form import arguments, emit_with, linear_groups, make_rule, shape_of
from autopar.passes.rules.rule import LocalCall, Rule
from autopar.passes.rules.table import rule

Dims = list[str | None]


def _heads(node: fx.Node) -> tuple[str, str | None, dict[str, int], list[str]]:
    """Return the factor of the query heads and of the key heads, given sizes, and what must be cut evenly.

    Query heads in groups that share a key head are cut by whole groups; with one key head for all they are cut freely.
    """
    named = arguments(node)
    heads, groups = shape_of(named["q"])[1], shape_of(named["k"])[1]
    if groups == heads:
        return "g", "g", {}, []
    if groups == 1:
        return "h", None, {}, []
    return "g", "g", {"g": groups}, ["g"]


def _localize(call: LocalCall) -> Any:
    piece = call.pieces.get("l")
    if piece is None or piece.parts == 1:
        return call.again()
    names = [argument.name for argument in call.target._schema.arguments]
    at = names.index("offset")
    offset = call.args[at] if at < len(call.args) else call.kwargs["offset"]
    return emit_with(call, offset=int(offset) + piece.offset)


def _mask(node: fx.Node, h: str) -> list[Dims]:
    mask = arguments(node)["mask"]
    if mask is None:
        return []
    sizes, whole = shape_of(mask), shape_of(arguments(node)["q"])
    return [[name if size == full else None for name, size, full in zip(("b", h, "l"), sizes, whole)] + [None]]


def _keys_seen(node: fx.Node) -> tuple[float, float]:
    """Return how many keys the first and the last query see."""
    named = arguments(node)
    queries, keys = shape_of(named["q"])[2], shape_of(named["k"])[2]
    if not named["causal"]:
        return float(keys), float(keys)
    start = int(named["offset"])
    return float(min(keys, max(0, start + 1))), float(min(keys, max(0, start + queries)))


def _flops(node: fx.Node, products: float) -> float:
    named = arguments(node)
    batch, heads, queries, width = shape_of(named["q"])
    pairs = sum(_keys_seen(node)) / 2 * queries
    return products * batch * heads * pairs * (width + shape_of(named["v"])[3])


def _growth(node: fx.Node) -> dict[str, float]:
    """Return how the work grows along the queries: late ones of a causal attention see more keys."""
    first, last = _keys_seen(node)
    return {"l": 2.0 * (last - first) / (last + first)} if last > first else {}


ROLES = {"b": "batch", "g": "head", "h": "head", "l": "sequence"}


@rule(torch.ops.autopar.attention.default)
def attention(node: fx.Node) -> Rule:
    """Attention: a piece of the queries starts at its own offset."""
    h, g, sizes, even = _heads(node)
    q: Dims = ["b", h, "l", None]
    kv: Dims = ["b", g, None, None]
    return make_rule(
        node,
        [q, kv, kv, *_mask(node, h)],
        [q, ["b", h, "l"]],
        sizes=sizes,
        even=even,
        roles=ROLES,
        growth=_growth(node),
        localize=_localize,
        flops=_flops(node, 2.0),
    )


@rule(torch.ops.autopar.attention_backward.default)
def attention_backward(node: fx.Node) -> Rule:
    """Its gradients: those of keys and values are partial sums over the queries; linear in the gradient."""
    h, g, sizes, even = _heads(node)
    q: Dims = ["b", h, "l", None]
    kv: Dims = ["b", g, None, None]
    return make_rule(
        node,
        [q, q, kv, kv, q, ["b", h, "l"], *_mask(node, h)],
        [q, kv, kv],
        kinds={"l": "sum", "h": "sum"},
        sizes=sizes,
        even=even,
        roles=ROLES,
        growth=_growth(node),
        linear=linear_groups(node, (0,)),
        localize=_localize,
        flops=_flops(node, 5.0),
    )
