"""Fold repeated names: ``layers.0.w`` ... ``layers.31.w`` become ``layers.*.w``, 32 times."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_DIGITS = re.compile(r"(\d+)")
_INDEX = re.compile(r"(?<=\.)\d+(?!\w)|(?<![\w.])\d+(?=\.\w)")


@dataclass(frozen=True)
class Fold(Generic[K]):
    """Names that share a pattern and a key.

    Attributes:
        label: their common name; ``*`` where their indices differ, or these indices themselves where only one differs
            and they are not all of their kind.
        names: all of them, in natural order.
        key: what they share.
    """

    label: str
    names: tuple[str, ...]
    key: K


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key under which ``layers.2`` comes before ``layers.10``."""
    parts = _DIGITS.split(name)
    return tuple((1, int(part), "") if index % 2 else (0, 0, part) for index, part in enumerate(parts))


def pattern_of(text: str) -> str:
    """Return ``text`` with a ``*`` for every index of a dotted name in it.

    >>> pattern_of("layers.3.mlp.w1.weight")
    'layers.*.mlp.w1.weight'
    """
    return _INDEX.sub("*", text)


def fold_names(keys: Mapping[str, K], within: Iterable[str] | None = None) -> list[Fold[K]]:
    """Return the names of ``keys`` folded by pattern and key, in natural order of their first names.

    An index that all names of a fold share stands in its label. A label has a ``*`` only if the fold has every name
    that it may mean and that is in ``within`` (by default ``keys``), or if several of its indices differ.

    >>> [fold.label for fold in fold_names({"h.0.w": 1, "h.1.w": 1, "h.2.w": 2, "x": 1})]
    ['h.0-1.w', 'h.2.w', 'x']
    >>> [fold.label for fold in fold_names({"h.0.1.w": 1, "h.1.1.w": 1, "h.0.3.w": 2, "h.1.3.w": 2})]
    ['h.*.1.w', 'h.*.3.w']
    """
    groups: dict[tuple[str, K], list[str]] = defaultdict(list)
    for name in sorted(keys, key=natural_key):
        groups[pattern_of(name), keys[name]].append(name)
    everything = list(keys if within is None else within)
    return [Fold(_label(names, everything), tuple(names), key) for (_, key), names in groups.items()]


def _label(names: list[str], everything: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    places = list(zip(*(_INDEX.findall(name) for name in names)))
    shown = ["*" if len(set(indices)) > 1 else indices[0] for indices in places]
    label = _with_indices(names[0], shown)
    if shown.count("*") != 1:
        return label
    place = shown.index("*")
    alike = sum(_with_indices(name, _only(_INDEX.findall(name), place)) == label for name in everything)
    if alike == len(names):
        return label
    return label.replace("*", _ranges(sorted(int(index) for index in places[place])))


def _only(indices: list[str], place: int) -> list[str]:
    """Return ``indices`` with a ``*`` at ``place``."""
    return ["*" if at == place else index for at, index in enumerate(indices)]


def _with_indices(name: str, indices: Sequence[str]) -> str:
    """Return ``name`` with these in the place of its indices."""
    left = iter(indices)
    return _INDEX.sub(lambda match: next(left, match.group()), name)


def _ranges(indices: list[int]) -> str:
    """Return sorted indices as text: ``0-2,5``."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
