"""Seconds and bytes of collectives on the link of an axis: ring, tree and hierarchical.

An algorithm is a count of steps and of bytes on the wire. A protocol trades latency for bandwidth, as NCCL's LL, LL128
and Simple do: small messages take a light one that reaches part of the bandwidth, large ones a heavy one that fills a
pipeline first. The price is the cheapest of all pairs, a fixed cost a call, and copies on the device where a collective
works along another dim than the first (its pieces must be made contiguous). All grows with bytes and with ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .devices import Device, Link

Numbers = TypeVar("Numbers", float, "np.ndarray[Any, Any]")

PROTOCOLS: tuple[tuple[float, float], ...] = ((1.0, 0.25), (2.2, 0.7), (4.4, 1.0))
"""Latency of a step, in those of the link, and share of its bandwidth: the light, middle and heavy protocol."""


def all_gather_seconds(num_ranks: int, bytes_in: Numbers, dim: int, link: Link, device: Device) -> Numbers:
    """Return the seconds of gathering ``num_ranks`` pieces of ``bytes_in`` bytes along ``dim``."""
    wire: Numbers = _pass_seconds(num_ranks, num_ranks * bytes_in, link)
    copies: Numbers = _copy_seconds(num_ranks * bytes_in, dim, device)
    return wire + copies + link.call_s + device.launch_s  # type: ignore[no-any-return]


def reduce_scatter_seconds(num_ranks: int, bytes_in: Numbers, dim: int, link: Link, device: Device) -> Numbers:
    """Return the seconds of reducing ``bytes_in`` bytes over the ranks and leaving each its piece of ``dim``."""
    wire: Numbers = _pass_seconds(num_ranks, bytes_in, link)
    copies: Numbers = _copy_seconds(bytes_in, dim, device)
    return wire + copies + link.call_s + device.launch_s  # type: ignore[no-any-return]


def all_reduce_seconds(num_ranks: int, bytes_in: Numbers, link: Link, device: Device) -> Numbers:
    """Return the seconds of reducing ``bytes_in`` bytes over the ranks and leaving each the whole."""
    ring: Numbers = 2 * _pass_seconds(num_ranks, bytes_in, link)
    return _least(ring, _tree_seconds(num_ranks, 2 * bytes_in, link)) + link.call_s + device.launch_s


def broadcast_seconds(num_ranks: int, bytes_in: Numbers, link: Link, device: Device) -> Numbers:
    """Return the seconds of sending ``bytes_in`` bytes from one rank to all."""
    return _tree_seconds(num_ranks, bytes_in, link) + link.call_s + device.launch_s


def all_to_all_seconds(
    num_ranks: int, bytes_in: Numbers, source_dim: int, target_dim: int, link: Link, device: Device
) -> Numbers:
    """Return the seconds of turning pieces of ``source_dim`` into pieces of ``target_dim``, ``bytes_in`` bytes a rank.

    Every rank sends a piece to each other one; what crosses nodes shares the ports of the node with its other ranks.
    """
    inside = min(link.ranks_inside, num_ranks)
    inner = link.inner or link
    within = (inside - 1) / num_ranks * bytes_in / inner.bytes_per_s
    port = link.bytes_per_s / inside
    across = (num_ranks - inside) / num_ranks * bytes_in / port
    steps_s = (inside - 1) * inner.latency_s + (num_ranks - inside) * link.latency_s
    wire = np.maximum(within, across) + PROTOCOLS[-1][0] * steps_s
    copies = _copy_seconds(bytes_in, source_dim, device) + _copy_seconds(bytes_in, target_dim, device)
    return wire + link.call_s + device.launch_s + copies  # type: ignore[no-any-return]


def send_seconds(bytes_in: Numbers, link: Link, device: Device) -> Numbers:
    """Return the seconds of sending ``bytes_in`` bytes from one rank to another."""
    port = link.bytes_per_s / link.ranks_inside
    return _best(1, link.latency_s, bytes_in / port) + link.call_s + device.launch_s


FEW_BYTES = 32
"""The largest sum that is one of a few numbers: eight of them in single precision."""


def collective_seconds(
    kind: str, num_ranks: int, bytes_in: Numbers, source: int, target: int, link: Link, device: Device
) -> Numbers:
    """Return the seconds of an arc of ``kind`` between two placement codes that is waited for; a slice is free.

    Args:
        kind: as ``Arc.kind``.
        num_ranks: the size of the axis.
        bytes_in: what the fullest rank hands in, see ``passes.insert_collectives.arc_bytes``.
        source, target: the placement codes on the axis before and after.
        link: the axis's own.
        device: where the copies run.
    """
    moving = moving_seconds(kind, num_ranks, bytes_in, source, target, link, device)
    if kind == "all_reduce" and link.few_s is not None:
        few = np.asarray(bytes_in) <= FEW_BYTES
        moving = np.where(few, np.minimum(link.few_s, moving), moving)  # type: ignore[assignment]
    return moving if kind == "slice" else moving + link.meet_s


def moving_seconds(
    kind: str, num_ranks: int, bytes_in: Numbers, source: int, target: int, link: Link, device: Device
) -> Numbers:
    """Return the same without what ranks that are not equally fast wait for each other."""
    if kind == "slice":
        return bytes_in * 0.0
    if kind == "all_gather":
        return all_gather_seconds(num_ranks, bytes_in, source, link, device)
    if kind == "reduce_scatter":
        return reduce_scatter_seconds(num_ranks, bytes_in, target, link, device)
    if kind == "all_reduce":
        return all_reduce_seconds(num_ranks, bytes_in, link, device)
    return all_to_all_seconds(num_ranks, bytes_in, source, target, link, device)


BUCKETED = ("all_gather", "all_reduce", "reduce_scatter")
"""Kinds that may run with others as one."""


@dataclass(frozen=True)
class Company:
    """What an arc may run with as one.

    Attributes:
        others: how many arcs may share buckets.
        share: this tensor's part of the bytes that nobody waits for before the end of the phase; 0 for others.
    """

    others: int
    share: float = 0.0


def bucketed_seconds(
    kind: str,
    num_ranks: int,
    bytes_in: Numbers,
    source: int,
    target: int,
    link: Link,
    device: Device,
    *,
    company: Company | None,
) -> Numbers:
    """Return the seconds of an arc that runs with others as one, or alone.

    It pays for its bytes and for its share of the starts. Where somebody waits, a bucket ends where its bytes take
    about as long as its start: bytes are paid for twice, and one bucket there is. What nobody waits for goes in few
    even buckets (``passes/improve/bucket_collectives.py``), as many as if all of it moved: sums do, and a gather among
    them finds no other. A large one goes alone.

    Args:
        company: of the arc, None for one that goes alone; the other arguments as for ``collective_seconds``.
    """
    alone: Numbers = collective_seconds(kind, num_ranks, bytes_in, source, target, link, device)
    if company is None or kind not in BUCKETED or (company.share and kind == "all_gather"):
        return alone
    start = moving_seconds(kind, num_ranks, bytes_in * 0.0, source, target, link, device)
    if company.share:
        together = moving_seconds(kind, num_ranks, bytes_in / company.share, source, target, link, device) - start
        contention = device.contention
        buckets = np.maximum(1.0, np.sqrt((1.0 - contention) * together / (contention * start)))
        shared: Numbers = company.share * (together + np.minimum(together + start, buckets * start))
    else:
        moving = moving_seconds(kind, num_ranks, bytes_in, source, target, link, device)
        shared = 2.0 * (moving - start) + start / max(company.others, 1)
    return _least(alone, shared)


def coalesced_seconds(kind: str, num_ranks: int, bytes_in: Sequence[float], link: Link, device: Device) -> float:
    """Return the seconds of several collectives of ``kind`` along the first dim that run as one, over one buffer.

    What is handed in is copied into the buffer. Sums and their pieces are views of what comes out; pieces that are
    gathered lie between those of other ranks, and are copied out.

    Args:
        bytes_in: what each hands in.
    """
    one = sum(bytes_in)
    seconds = float(moving_seconds(kind, num_ranks, one, 0, 0, link, device))
    if len(bytes_in) == 1:
        return seconds
    copied = one * (1 + num_ranks if kind == "all_gather" else 1)
    return seconds + float(device.stream_seconds(2.0 * copied))


def _pass_seconds(num_ranks: int, bytes_total: Numbers, link: Link) -> Numbers:
    """Return the seconds of an all-gather or reduce-scatter of ``bytes_total``.

    One ring of all ranks is a pipeline: its slowest hop sets the pace. Or two rings follow each other, one between
    nodes and one inside, with fewer steps.
    """
    inside = min(link.ranks_inside, num_ranks)
    nodes = -(-num_ranks // inside)
    if link.inner is None or inside == 1:
        share = (num_ranks - 1) / num_ranks
        return _best(num_ranks - 1, link.latency_s, share * bytes_total / link.bytes_per_s)
    if nodes == 1:
        return _pass_seconds(num_ranks, bytes_total, link.inner)
    pace = min(link.inner.bytes_per_s, link.bytes_per_s)
    steps_s = (num_ranks - nodes) * link.inner.latency_s + (nodes - 1) * link.latency_s
    ring = _best(1, steps_s, (num_ranks - 1) / num_ranks * bytes_total / pace)
    between = _best(nodes - 1, link.latency_s, (nodes - 1) / nodes * bytes_total / link.bytes_per_s)
    within = _best(inside - 1, link.inner.latency_s, (inside - 1) / inside * bytes_total / link.inner.bytes_per_s)
    return _least(ring, between + within)


def _tree_seconds(num_ranks: int, bytes_sent: Numbers, link: Link) -> Numbers:
    """Return the seconds of a tree between nodes and a chain inside them; every rank sends ``bytes_sent`` on."""
    inside = min(link.ranks_inside, num_ranks)
    nodes = -(-num_ranks // inside)
    inner = link.inner or link
    pace = link.bytes_per_s if nodes > 1 else inner.bytes_per_s
    pace = min(pace, inner.bytes_per_s)
    steps_s = (inside - 1) * inner.latency_s + math.ceil(math.log2(nodes)) * link.latency_s
    return _best(2, steps_s, bytes_sent / pace)


def _best(num_steps: float, latency_s: float, wire_s: Numbers) -> Numbers:
    """Return the seconds under the protocol that is fastest for this size."""
    out = wire_s + math.inf
    for latency, share in PROTOCOLS:
        out = _least(out, num_steps * latency * latency_s + wire_s / share)
    return out


def _least(first: Numbers, second: Numbers) -> Numbers:
    return np.minimum(first, second)  # type: ignore[no-any-return]


def _copy_seconds(bytes_copied: Numbers, dim: int, device: Device) -> Numbers:
    if dim == 0:
        return bytes_copied * 0.0
    return 2.0 * bytes_copied / device.stream_bytes_per_s + device.launch_s
