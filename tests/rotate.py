"""Samples of slow cases that change with the date; the deep profile runs all of them."""

from __future__ import annotations

import datetime
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from hypothesis import settings

Case = TypeVar("Case")

DEEP = settings.default is not None and settings.default.max_examples >= 1000


def todays(cases: Sequence[Case], kind: Callable[[Case], Hashable], more: int = 0) -> list[Case]:
    """Return one case of every kind, and so many others: another choice every day, the same all day.

    Args:
        cases: all of them.
        kind: of a case; each has its turn every day.
        more: how many besides.
    """
    if DEEP:
        return list(cases)
    draw = random.Random(datetime.date.today().toordinal())
    by_kind: dict[Hashable, list[Case]] = defaultdict(list)
    for case in cases:
        by_kind[kind(case)].append(case)
    picked = [draw.choice(each) for each in by_kind.values()]
    left = [case for case in cases if case not in picked]
    picked += draw.sample(left, min(more, len(left)))
    return [case for case in cases if case in picked]
