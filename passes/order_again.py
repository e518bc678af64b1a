"""Order what the backward computes again: every op after those whose results it reads."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from .program import is_getitem, tensor_operands


def order_again(tensor: fx.Node, again: Collection[str]) -> list[fx.Node]:
    """Return the forward ops that must be computed again before ``tensor`` is there, the one that computes it last.

    A chain of such ops may be as long as the forward, so the walk keeps a stack of its own.

    Args:
        tensor: what the backward reads.
        again: names of the ops that are computed again and have not been yet.
    """
    order: dict[fx.Node, None] = {}
    stack = [_computed_by(tensor)]
    while stack:
        op = stack[-1]
        if op in order or not _is_again(op, again):
            stack.pop()
            continue
        missing = [owner for owner in map(_computed_by, tensor_operands(op)) if _is_again(owner, again)]
        missing = [owner for owner in missing if owner not in order]
        if missing:
            stack += reversed(missing)
        else:
            order[stack.pop()] = None
    return list(order)


def _computed_by(tensor: fx.Node) -> fx.Node:
    owner = tensor.args[0] if is_getitem(tensor) else tensor
    assert isinstance(owner, fx.Node)
    return owner


def _is_again(op: fx.Node, again: Collection[str]) -> bool:
    return op.name in again and op.meta["phase"] != "backward"
