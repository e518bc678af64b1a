"""The link of a group along several axes of a mesh, from the links of the axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .devices import Link


def join_links(links: Sequence[Link], sizes: Sequence[int]) -> Link | None:
    """Return the link of all ranks along some axes; None where the links of the axes do not tell.

    Args:
        links: of the axes, the slowest axis first: a later axis connects ranks that lie nearer to each other.
        sizes: ranks along each.
    """
    joined, ranks = links[-1], sizes[-1]
    for outer, size in zip(reversed(links[:-1]), reversed(sizes[:-1])):
        both = _join(outer, joined, ranks)
        if both is None:
            return None
        joined, ranks = both, ranks * size
    return joined


def _join(outer: Link, inner: Link, ranks: int) -> Link | None:
    """Join the link of an axis with that of ``ranks`` ranks that lie nearer to each other.

    Where one step of the outer axis is between nodes and the ranks of the inner one lie in a node, the ports of all of
    them carry what goes between nodes: each of the groups had its own, or its share of one.
    """
    if inner.inner is not None:  # the nearer ranks span nodes: so do all, over the same ports
        return inner if outer.inner is None and outer.latency_s == inner.latency_s else None
    if outer == inner:
        return inner
    within = inner if outer.inner is None else outer.inner
    slower = outer.latency_s >= inner.latency_s and outer.bytes_per_s <= inner.bytes_per_s
    if within != inner or (outer.inner is None and not slower):
        return None
    return replace(
        outer,
        name=f"{inner.name}*{ranks * outer.ranks_inside}+{outer.name}",
        bytes_per_s=outer.bytes_per_s * ranks,
        call_s=max(outer.call_s, inner.call_s),
        meet_s=max(outer.meet_s, inner.meet_s),
        inner=inner,
        ranks_inside=ranks * outer.ranks_inside,
    )
