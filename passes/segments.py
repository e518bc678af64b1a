"""Cut the forward into segments: what a segment computes may be computed again, by itself, when its backward begins.

A tensor that only its own segment's forward reads can be dropped and computed again from what is saved; one that a
later segment reads is the boundary between them, and is saved wherever the backward needs it. So computing again costs
each op at most once, and at any time only one segment's tensors are back (Chen et al., "Training deep nets with
sublinear memory cost", 2016, section 4, with the saved set inside a segment left to the solver).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import fx

from .fold import Folding
from .program import Program, is_getitem, tensors_of

Bytes = NDArray[np.int64]

LONGEST = 48
"""Ops outside repeated blocks from which a stretch of the forward is cut at its narrow places."""
MOST_CUTS = 15


def cut_segments(program: Program, folding: Folding) -> dict[str, int]:
    """Return the segment of every forward op, numbered in graph order.

    Repeated blocks are cut once a period, where the fewest bytes cross; long stretches outside of them likewise, into
    parts of about equal bytes.
    """
    ops = list(program.ops())
    forward = [i for i, node in enumerate(ops) if node.meta["phase"] == "forward"]
    if not forward:
        return {}
    crossing = _crossing_bytes(ops)
    cuts: set[int] = set()
    end = forward[-1] + 1
    for start, length, period in folding.runs:
        if ops[start].meta["phase"] == "forward":
            offsets = range(period)
            best = min(
                offsets, key=lambda o: int(crossing[start + o + period : start + length : period].max(initial=0))
            )
            cuts.update(range(start + best, start + length, period))
    for begin, stop in _stretches(sorted(cuts), end):
        cuts.update(_narrow_places(ops, crossing, begin, stop))
    bounds = sorted(cuts)
    return {ops[i].name: int(np.searchsorted(bounds, i, side="right")) for i in forward}


def repeatable_ops(program: Program, segment_of: dict[str, int]) -> set[str]:
    """Return the forward ops that may be computed again: nobody outside their segment needs their results late.

    Late needs are those of the backward, and of ops that are themselves computed again.
    """
    out = set()
    for node in program.ops():
        if node.name not in segment_of or node.op != "call_function":
            continue
        here = segment_of[node.name]
        if all(segment_of.get(reader.name, here) == here for reader in _forward_readers(node)):
            out.add(node.name)
    return out


def _forward_readers(node: fx.Node) -> list[fx.Node]:
    out = []
    for user in node.users:
        if is_getitem(user):
            out += _forward_readers(user)
        elif user.op != "output":
            out.append(user)
    return out


def _crossing_bytes(ops: Sequence[fx.Node]) -> Bytes:
    """Return, for every position, the bytes of the tensors made before it that ops of the forward read from it on."""
    position = {node: i for i, node in enumerate(ops)}
    change = np.zeros(len(ops) + 1, dtype=np.int64)
    for node in ops:
        if node.meta["phase"] != "forward":
            continue
        ends = [position[r] for r in _forward_readers(node) if r in position and r.meta["phase"] == "forward"]
        if ends:
            weight = sum(value.numel() * value.dtype.itemsize for value in tensors_of(node))
            change[position[node] + 1] += weight
            change[max(ends) + 1] -= weight
    return np.cumsum(change)


def _stretches(cuts: Sequence[int], end: int) -> list[tuple[int, int]]:
    bounds = [0, *cuts, end]
    return [(a, b) for a, b in pairwise(bounds) if b - a > LONGEST]


def _narrow_places(ops: Sequence[fx.Node], crossing: Bytes, begin: int, stop: int) -> list[int]:
    """Return cuts of a stretch into parts of about equal bytes, each at the narrowest place near its target."""
    weights = [sum(v.numel() * v.dtype.itemsize for v in tensors_of(node)) for node in ops[begin:stop]]
    total = np.cumsum(weights)
    parts = min(MOST_CUTS, (stop - begin) // (LONGEST // 2))
    out = []
    for part in range(1, parts):
        low, high = (int(np.searchsorted(total, total[-1] * (part + d) / parts)) for d in (-0.4, 0.4))
        places = range(max(low, 1), max(high, low + 2))
        out.append(begin + min(places, key=lambda i: (int(crossing[min(begin + i, stop - 1)]), i)))
    return out
