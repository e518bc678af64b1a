"""Find repeated blocks of the graph and tie their copies.

A class is a set of nodes that share their decisions. Blocks are tandem repeats of node signatures in graph order: in a
maximal run with period ``p`` the nodes at one position modulo ``p`` form a class. Nothing is dropped: tensors are
grouped later by the classes of their producer and of all their consumers, so a boundary between blocks keeps its own
network.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx
from torch.utils import _pytree as pytree

from .program import Program, is_getitem, result_values, tensor_operands

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Folding:
    """Which nodes decide together.

    Attributes:
        class_of: op or placeholder name -> the name of the first node of its class.
        runs: of repeated blocks: ``(first op, ops, ops of one block)``.
    """

    class_of: dict[str, str]
    runs: tuple[tuple[int, int, int], ...] = ()

    @property
    def num_regions(self) -> int:
        """How many runs of repeated blocks there are."""
        return len(self.runs)


def no_fold(program: Program) -> Folding:
    """Return the folding in which every node decides alone."""
    names = [role.node for role in program.inputs] + [node.name for node in program.ops()]
    return Folding({name: name for name in names})


def fold(program: Program, extra: Callable[[str], Hashable] = lambda name: None) -> Folding:
    """Return the folding of an annotated program.

    Args:
        program: every op has ``meta["rule"]``.
        extra: what else must be equal between nodes (or placeholders) of one class, such as a constraint on them.
    """
    ops = list(program.ops())
    ids = _signature_ids(ops, extra)
    runs = find_runs(ids)
    class_of = {node.name: node.name for node in ops}
    for start, length, period in runs:
        for i in range(start, start + length):
            class_of[ops[i].name] = ops[start + (i - start) % period].name
    class_of.update(_fold_inputs(program, class_of, extra))
    return Folding(class_of, tuple(runs))


def find_runs(ids: Ids, min_repeats: int = 2, min_period: int = 12) -> list[tuple[int, int, int]]:
    """Return disjoint tandem repeats ``(start, length, period)`` of a sequence, those that tie most first found.

    A run of ``length >= min_repeats * period`` satisfies ``ids[i] == ids[i + period]`` inside. Candidate periods are
    the gaps between equal ids. Periods are at least ``min_period``: very short blocks would tie neighbours that a
    good plan splits in turns (a column split, then a row split).

    >>> find_runs(np.array([9, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 8]), min_period=4)
    [(1, 12, 4)]
    """
    found: list[tuple[int, int, int]] = []
    _find_runs(ids, 0, min_repeats, min_period, found)
    return sorted(found)


def _find_runs(ids: Ids, base: int, min_repeats: int, min_period: int, found: list[tuple[int, int, int]]) -> None:
    best: tuple[int, int, int, int] | None = None
    for period in _candidate_periods(ids, min_period):
        if period * min_repeats > len(ids):
            continue
        same = np.concatenate(([False], ids[period:] == ids[:-period], [False]))
        edges = np.flatnonzero(same[1:] != same[:-1])
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            length = int(end - begin) + period
            if length < min_repeats * period:
                continue
            offer = (int(end - begin), -period, -int(begin), length)
            if best is None or offer > best:
                best = offer
    if best is None:
        return
    start, length, period = -best[2], best[3], -best[1]
    found.append((base + start, length, period))
    _find_runs(ids[:start], base, min_repeats, min_period, found)
    _find_runs(ids[start + length :], base + start + length, min_repeats, min_period, found)


def _candidate_periods(ids: Ids, min_period: int) -> list[int]:
    gaps: Counter[int] = Counter()
    order = np.argsort(ids, kind="stable")
    bounds = np.flatnonzero(np.diff(ids[order])) + 1
    for places in np.split(order, bounds):
        if len(places) < 2:
            continue
        for step in (1, 2, 3, 4):
            if len(places) > step:
                values, counts = np.unique(places[step:] - places[:-step], return_counts=True)
                for gap, count in zip(values.tolist(), counts.tolist(), strict=True):
                    gaps[gap] += count
    return [gap for gap, _ in sorted(gaps.items(), key=lambda item: (-item[1], item[0])) if gap >= min_period][:200]


def _signature_ids(ops: list[fx.Node], extra: Callable[[str], Hashable]) -> Ids:
    known: dict[Hashable, int] = {}
    out = [known.setdefault(_signature(node, extra(node.name)), len(known)) for node in ops]
    return np.array(out, dtype=np.int64)


def _signature(node: fx.Node, extra: Hashable) -> Hashable:
    leaves = tuple(
        "*" if isinstance(leaf, fx.Node) else repr(leaf)
        for leaf in pytree.arg_tree_leaves(node.args, dict(sorted(node.kwargs.items())))
    )
    operands = tuple(_describe(operand.meta["val"]) for operand in tensor_operands(node))
    results = tuple((index, *_describe(value)) for index, value in result_values(node))
    rule = node.meta["rule"]
    shape = (rule.factors, rule.operands, rule.results, rule.linear, rule.through, rule.same, rule.flops)
    return (str(node.target), leaves, operands, results, shape, node.meta["phase"], extra)


def _describe(value: torch.Tensor) -> tuple[Any, ...]:
    return (tuple(value.shape), str(value.dtype))


def _fold_inputs(program: Program, class_of: dict[str, str], extra: Callable[[str], Hashable]) -> dict[str, str]:
    """Class parameters and buffers by what they are and by the classes that read and make them."""
    nodes = program.nodes()
    gradients = {role.of: role.node for role in program.outputs if role.kind == "gradient"}
    renewed = {role.of: role.node for role in program.outputs if role.kind == "buffer"}
    groups: dict[Hashable, list[str]] = defaultdict(list)
    for role in program.inputs:
        if role.kind in ("parameter", "buffer"):
            key: Hashable = (
                role.kind,
                role.requires_grad,
                _describe(nodes[role.node].meta["val"]),
                _readers(nodes[role.node], class_of),
                _maker(nodes, gradients.get(role.node), class_of),
                _maker(nodes, renewed.get(role.node), class_of),
                extra(role.node),
            )
        else:
            key = role.node
        groups[key].append(role.node)
    return {name: members[0] for members in groups.values() for name in members}


def _readers(node: fx.Node, class_of: dict[str, str]) -> Hashable:
    pairs: Counter[tuple[str, int]] = Counter()
    for user in node.users:
        if user.name in class_of:
            for slot, operand in enumerate(tensor_operands(user)):
                if operand is node:
                    pairs[class_of[user.name], slot] += 1
        else:
            pairs[user.name, -1] += 1
    return tuple(sorted(pairs.items()))


def _maker(nodes: dict[str, fx.Node], name: str | None, class_of: dict[str, str]) -> Hashable:
    if name is None:
        return None
    node = nodes[name]
    if is_getitem(node):
        source, index = node.args
        assert isinstance(source, fx.Node)
        return (class_of[source.name], index)
    return (class_of.get(name, name), 0)
