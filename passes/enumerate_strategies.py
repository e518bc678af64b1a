"""Enumerate the strategies of an op: one choice an axis, with all layouts and the local work, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import fx

from .cost.compute import compute_dtype, is_view, numbers_drawn, op_seconds, product_of
from .cost.fusion import ALONE, Traffic
from .program import result_values, tensor_operands
from .rules.rule import Choice, Rule
from .solve.layout_graph import Bools, Floats, Ints, Prices, encode_columns, piece_legality, piece_lengths


@dataclass(frozen=True, eq=False)
class Strategies:
    """The strategies of one op, a row each.

    Attributes:
        operands: encoded layout of every operand, ``[rows, operands]``.
        results: encoded layout of every result, ``[rows, results]``.
        seconds: of the op on the fullest rank.
        bytes: that the decision itself keeps on a rank (a parameter's); 0 for an op.
        result_bytes: of all results on the fullest rank; 0 for a view.
        choices: index into the rule's choices on each axis, ``[rows, axes]``.
    """

    operands: Ints
    results: Ints
    seconds: Floats
    bytes: Ints
    result_bytes: Ints
    choices: Ints

    def __len__(self) -> int:
        return len(self.seconds)

    def take(self, rows: Ints | Bools) -> Strategies:
        """Return only these rows."""
        return replace(
            self,
            operands=self.operands[rows],
            results=self.results[rows],
            seconds=self.seconds[rows],
            bytes=self.bytes[rows],
            result_bytes=self.result_bytes[rows],
            choices=self.choices[rows],
        )


def layouts_as_strategies(layouts: Ints, seconds: Floats | None = None, num_bytes: Ints | None = None) -> Strategies:
    """Return one strategy a layout: it demands that layout (operand 0) and gives it (result 0)."""
    count = len(layouts)
    return Strategies(
        layouts.reshape(count, 1),
        layouts.reshape(count, 1),
        np.zeros(count) if seconds is None else seconds,
        np.zeros(count, dtype=np.int64) if num_bytes is None else num_bytes,
        np.zeros(count, dtype=np.int64),
        np.zeros((count, 0), dtype=np.int64),
    )


class StrategyTable:
    """Enumerates strategies and keeps them: ops that look alike share theirs."""

    def __init__(self, prices: Prices, drop_dominated: bool = True) -> None:
        self.prices = prices
        self.drop_dominated = drop_dominated
        self._made: dict[Any, Strategies] = {}

    def strategies(self, node: fx.Node) -> Strategies:
        """Return the legal strategies of an annotated op node without dominated ones; one replicates on all axes."""
        rule: Rule = node.meta["rule"]
        operands = [operand.meta["val"] for operand in tensor_operands(node)]
        results = [value for _, value in result_values(node)]
        traffic: Traffic = node.meta.get("traffic", ALONE)
        key = (
            str(node.target),
            rule.factors,
            rule.operands,
            rule.results,
            rule.linear,
            rule.through,
            rule.same,
            rule.flops,
            rule.random,
            tuple((tuple(value.shape), value.dtype) for value in (*operands, *results)),
            traffic,
        )
        if key not in self._made:
            self._made[key] = enumerate_strategies(
                node.target, rule, operands, results, self.prices, traffic=traffic, drop_dominated=self.drop_dominated
            )
        return self._made[key]


def enumerate_strategies(
    target: Any,
    rule: Rule,
    operands: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    prices: Prices,
    *,
    traffic: Traffic = ALONE,
    drop_dominated: bool = True,
) -> Strategies:
    """Return every legal strategy of an op on the mesh of ``prices``.

    Args:
        target: the op.
        rule: its factors.
        operands, results: tensors of the global shapes and dtypes.
        prices: mesh and device.
        traffic: what the op reads and writes itself, and what stays in the kernel that it shares with others.
        drop_dominated: leave out strategies with the layouts of another one that is not dearer.
    """
    sizes = prices.mesh.sizes
    all_choices = rule.choices()
    per_axis = [range(len(all_choices)) if n > 1 else range(1) for n in sizes]
    rows = np.array(list(product(*per_axis)), dtype=np.int64).reshape(-1, len(sizes))
    flops_share = np.ones(len(rows))
    lengths: dict[str, Ints] = {}
    legal = np.ones(len(rows), dtype=np.bool_)
    for factor in rule.factors:
        split = np.array([choice.factor is not None and choice.factor.name == factor.name for choice in all_choices])
        subset = _subsets(split, rows)
        legal &= piece_legality(factor.size, sizes, factor.even)[subset]
        lengths[factor.name] = piece_lengths(factor.size, sizes)[subset]
        flops_share *= factor.work_share(lengths[factor.name])
    sides = []
    bytes_moved = np.zeros(len(rows))
    result_bytes = np.zeros(len(rows), dtype=np.int64)
    for what, tensors in (("operands", operands), ("results", results)):
        columns = np.zeros((len(rows), len(tensors)), dtype=np.int64)
        for slot, tensor in enumerate(tensors):
            codes = np.array([getattr(choice, what)[slot] for choice in all_choices], dtype=np.int64)
            fits, numel = _weigh(tuple(tensor.shape), codes, rows, sizes)
            legal &= fits
            bytes_moved += numel * tensor.dtype.itemsize * traffic.share(what, slot)
            if what == "results" and not is_view(target):
                result_bytes += numel * tensor.dtype.itemsize
            columns[:, slot] = encode_columns([codes[rows[:, axis]] for axis in range(len(sizes))])
        sides.append(columns)
    dtype = compute_dtype([*operands, *results])
    seconds = op_seconds(
        target,
        rule.flops * flops_share,
        bytes_moved,
        dtype,
        prices.device,
        product=product_of(rule, lengths),
        launches=traffic.launches,
        drawn=numbers_drawn(rule, results),
    )
    none = np.zeros(len(rows), dtype=np.int64)
    out = Strategies(sides[0], sides[1], seconds, none, result_bytes, rows).take(legal)
    return _cheapest_of_each(out) if drop_dominated else out


def choice_names(rule: Rule, row: Ints) -> tuple[str, ...]:
    """Return the names of the choices of a strategy, one an axis."""
    choices: tuple[Choice, ...] = rule.choices()
    return tuple(choices[int(index)].name for index in row)


def _subsets(split: Bools, rows: Ints) -> Ints:
    """Return which axes split something, a bit an axis, for every row of choices."""
    out = np.zeros(len(rows), dtype=np.int64)
    for axis in range(rows.shape[1]):
        out += split[rows[:, axis]].astype(np.int64) << axis
    return out


def _weigh(shape: tuple[int, ...], codes: Ints, rows: Ints, sizes: Sequence[int]) -> tuple[Bools, Ints]:
    """Return for every row whether a tensor may lie so (one kind of partial, no empty piece) and the local elements."""
    legal = np.ones(len(rows), dtype=np.bool_)
    numel = np.ones(len(rows), dtype=np.int64)
    for dim, size in enumerate(shape):
        subset = _subsets(codes == dim, rows)
        legal &= piece_legality(size, sizes)[subset]
        numel *= piece_lengths(size, sizes)[subset]
    partials = sorted({int(code) for code in codes if code < -1})
    if len(partials) > 1:
        legal &= sum((_subsets(codes == code, rows) > 0).astype(np.int64) for code in partials) <= 1
    return legal, numel


def _cheapest_of_each(strategies: Strategies) -> Strategies:
    """Keep the cheapest of all strategies with the same layouts, the first on a tie, in the old order."""
    layouts = np.concatenate([strategies.operands, strategies.results], axis=1)
    order = np.argsort(strategies.seconds, kind="stable")
    _, first = np.unique(layouts[order], axis=0, return_index=True)
    return strategies.take(np.sort(order[first]))
