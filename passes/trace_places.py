"""Reads and writes at a place that a tensor of one number tells: eager PyTorch reads the number, a trace can't."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.errors import CaptureError


@dataclass
class _Read:
    """What was read from where, at which line, and how often it may have been written to."""

    result: Tensor
    input: Tensor
    index: Any
    source: str
    version: int = 0


class Places:
    """Traces ``x[i]`` and ``x[i] = value`` for such an ``i``; remembers what was read, which is no view here."""

    def __init__(self) -> None:
        self._reads: list[_Read] = []

    def call(self, func: Any, args: Any, source: str) -> Any:
        """Return what ``x[index]`` or ``x[index] = value`` gives; NotImplemented where no part is one number."""
        if func not in (Tensor.__getitem__, Tensor.__setitem__):
            return NotImplemented
        taken = _parts(args[0], args[1])
        if taken is None:
            return NotImplemented
        parts, places = taken
        pieces = [args[0]]
        for dim, place in places:
            pieces.append(pieces[-1].index_select(dim, place))
        if func is Tensor.__getitem__:
            result = pieces[-1][parts]
            self._reads.append(_Read(result, args[0], args[1], source))
            return result
        for read in self._reads:
            if read.result is args[2] and read.input is args[0] and _same(read.index, args[1]):
                read.version = read.result._version  # x[i] += value puts back what it has read and written to
        pieces[-1][parts] = args[2]
        for (dim, place), whole, piece in reversed(list(zip(places, pieces, pieces[1:]))):
            whole.index_copy_(dim, place, piece)
        return None

    def require_unwritten(self) -> None:
        """Check that nothing was written to what was read: it would not reach the tensor that it was read from.

        Raises:
            CaptureError: with the line.
        """
        for read in self._reads:
            if read.result._version > read.version:
                place = f" at {read.source}" if read.source else ""
                raise CaptureError(
                    f"the model writes into what it reads{place} at a place that a tensor "
                    "tells, which a trace takes for a copy. Write x[i] = value, or use index_copy_ or index_add_."
                )


def _same(one: Any, other: Any) -> bool:
    """Tell whether two indices are made of the same parts."""
    pair = [list(index) if isinstance(index, tuple) else [index] for index in (one, other)]
    return len(pair[0]) == len(pair[1]) and all(
        a is b if isinstance(a, Tensor) or isinstance(b, Tensor) else a == b for a, b in zip(*pair)
    )


def _parts(input: Tensor, index: Any) -> tuple[tuple[Any, ...], list[tuple[int, Tensor]]] | None:
    """Return the index with 0 for every such number, and ``(dim, place)`` of each; None if there is none."""
    parts = list(index) if isinstance(index, tuple) else [index]
    sizes = [_num_dims(part) for part in parts]
    if None in sizes or sum(part is Ellipsis for part in parts) > 1:
        return None
    rest = input.dim() - sum(size or 0 for size in sizes)
    places, dim = [], 0
    for number, part in enumerate(parts):
        if _is_number(part):
            if not 0 <= dim < input.dim():
                return None
            length = input.shape[dim]
            places.append((dim, torch.where(part < 0, part + length, part).long().reshape(1)))
            parts[number] = 0
        dim += rest if part is Ellipsis else sizes[number] or 0
    return (tuple(parts), places) if places else None


def _is_number(part: Any) -> bool:
    whole = isinstance(part, Tensor) and not (part.is_floating_point() or part.is_complex())
    return whole and part.dim() == 0 and part.dtype not in (torch.bool, torch.uint8)


def _num_dims(part: Any) -> int | None:
    """Return how many dims of the tensor a part of an index stands for; None if it is not clear."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8):
        return part.dim()
    return 1 if isinstance(part, (int, slice, Tensor, list)) else None
