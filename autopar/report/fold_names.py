"""Fold repeated names: ``layers.0.w`` ... ``layers.31.w`` become ``layers.*.w``, 32 times."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_DIGITS = re.compile(r"(\d+)")
_INDEX = re.compile(r"(?<=\.)\d+(?!\w)|(?<![\w.])\d+(?=\.\w)")


@dataclass(frozen=True)
class Fold(Generic[K]):
    """Names that share a pattern and a key.

    Attributes:
        label: their common name; ``*`` where they have all the indices of the pattern, else the indices themselves.
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

    A label has a ``*`` only if the fold has every name of its pattern that is in ``within`` (by default ``keys``).

    >>> [fold.label for fold in fold_names({"h.0.w": 1, "h.1.w": 1, "h.2.w": 2, "x": 1})]
    ['h.0-1.w', 'h.2.w', 'x']
    """
    groups: dict[tuple[str, K], list[str]] = defaultdict(list)
    for name in sorted(keys, key=natural_key):
        groups[pattern_of(name), keys[name]].append(name)
    uses = Counter(pattern_of(name) for name in (keys if within is None else within))
    return [
        Fold(_label(pattern, names, uses[pattern] == len(names)), tuple(names), key)
        for (pattern, key), names in groups.items()
    ]


def _label(pattern: str, names: list[str], every: bool) -> str:
    if len(names) == 1:
        return names[0]
    if every or pattern.count("*") != 1:
        return pattern
    indices = sorted(int(_INDEX.findall(name)[0]) for name in names)
    return pattern.replace("*", _ranges(indices))


def _ranges(indices: list[int]) -> str:
    """Return sorted indices as text: ``0-2,5``."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
