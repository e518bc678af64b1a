"""Compute once what is computed twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..collective_calls import WAIT, is_collective
from ..program import is_getitem, touches_generator
from .edits import Edit, Merge
from .setting import Setting


def merge_equal(joint: fx.GraphModule, setting: Setting) -> list[Edit]:
    """Return the ops whose result is there already: the same op on the same values, in the same phase.

    Sizes and offsets of this rank may be equal where those of another rank are not, so ops with numbers in their
    arguments stay. So do ops that the plan computes again to save memory, random ones, and collectives, each of which
    the plan lists. With a budget nothing is merged but what costs no memory: the first result lives longer.
    """
    seen: dict[Any, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}
    edits: list[Edit] = []
    for node in joint.graph.nodes:
        if node.op != "call_function" or not _may_merge(node):
            continue
        if setting.memory_bytes is not None and not is_getitem(node):
            continue
        leaves, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
        if not all(_is_global(leaf) for leaf in leaves) and not is_getitem(node):
            continue
        leaves = [same.get(leaf, leaf) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        key = (node.target, node.meta["phase"], str(spec), tuple(leaves))
        first = seen.setdefault(key, node)
        if first is not node:
            same[node] = first
            edits.append(Merge(node.name, first.name))
    return edits


def _may_merge(node: fx.Node) -> bool:
    if is_collective(node) or node.target is WAIT or touches_generator(node) or node.meta.get("again"):
        return False
    return is_getitem(node) or (isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable)


def _is_global(leaf: Any) -> bool:
    """Tell whether an argument is the same on every rank."""
    return leaf is None or isinstance(leaf, (fx.Node, bool, torch.dtype, torch.device, torch.layout))
