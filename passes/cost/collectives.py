"""Seconds and bytes of collectives: ring algorithms with a latency and a bandwidth on the axis's own link.

Every kind is a sum of ``steps * latency``, ``bytes on the wire / bandwidth``, one launch, and copies on the device where a
collective works along another dim than the first (its pieces must be made contiguous). Everything grows with bytes and ranks.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from .devices import Device, Link

Numbers = TypeVar("Numbers", float, "np.ndarray[Any, Any]")


def all_gather_seconds(num_ranks: int, bytes_in: Numbers, dim: int, link: Link, device: Device) -> Numbers:
    """Return the seconds of gathering ``num_ranks`` pieces of ``bytes_in`` bytes along ``dim``."""
    steps = num_ranks - 1
    wire = steps * link.latency_s + steps * bytes_in / link.bytes_per_s + device.launch_s
    return wire + _copy_seconds(num_ranks * bytes_in, dim, device)


def reduce_scatter_seconds(num_ranks: int, bytes_in: Numbers, dim: int, link: Link, device: Device) -> Numbers:
    """Return the seconds of reducing ``bytes_in`` bytes over the ranks and leaving each its piece of ``dim``."""
    steps = num_ranks - 1
    wire = steps * link.latency_s + steps / num_ranks * bytes_in / link.bytes_per_s + device.launch_s
    return wire + _copy_seconds(bytes_in, dim, device)


def all_reduce_seconds(num_ranks: int, bytes_in: Numbers, link: Link, device: Device) -> Numbers:
    """Return the seconds of reducing ``bytes_in`` bytes over the ranks and leaving each the whole."""
    steps = 2 * (num_ranks - 1)
    return steps * link.latency_s + steps / num_ranks * bytes_in / link.bytes_per_s + device.launch_s


def all_to_all_seconds(
    num_ranks: int, bytes_in: Numbers, source_dim: int, target_dim: int, link: Link, device: Device
) -> Numbers:
    """Return the seconds of turning pieces of ``source_dim`` into pieces of ``target_dim``, ``bytes_in`` bytes a rank."""
    steps = num_ranks - 1
    wire = steps * link.latency_s + steps / num_ranks * bytes_in / link.bytes_per_s + device.launch_s
    return wire + _copy_seconds(bytes_in, source_dim, device) + _copy_seconds(bytes_in, target_dim, device)


def collective_seconds(
    kind: str, num_ranks: int, bytes_in: Numbers, source: int, target: int, link: Link, device: Device
) -> Numbers:
    """Return the seconds of an arc of ``kind`` between two placement codes; a slice is free.

    Args:
        kind: as ``Arc.kind``.
        num_ranks: the size of the axis.
        bytes_in: what one rank hands in, see ``bytes_handed_in``.
        source, target: the placement codes on the axis before and after.
        link: the axis's own.
        device: where the copies run.
    """
    if kind == "slice":
        return bytes_in * 0.0
    if kind == "all_gather":
        return all_gather_seconds(num_ranks, bytes_in, source, link, device)
    if kind == "reduce_scatter":
        return reduce_scatter_seconds(num_ranks, bytes_in, target, link, device)
    if kind == "all_reduce":
        return all_reduce_seconds(num_ranks, bytes_in, link, device)
    return all_to_all_seconds(num_ranks, bytes_in, source, target, link, device)


def _copy_seconds(bytes_copied: Numbers, dim: int, device: Device) -> Numbers:
    if dim == 0:
        return bytes_copied * 0.0
    return 2.0 * bytes_copied / device.memory_bytes_per_s + device.launch_s


def bytes_handed_in(kind: str, num_ranks: int, source_numel: int, target_numel: int, itemsize: int) -> int:
    """Return the bytes that one rank hands to a collective; uneven pieces are padded to the longest.

    Args:
        kind: as ``Arc.kind``.
        num_ranks: the size of the axis.
        source_numel, target_numel: elements of the largest rank's piece before and after.
        itemsize: bytes of an element.
    """
    if kind == "slice":
        return 0
    padded = num_ranks * target_numel if kind in ("reduce_scatter", "all_to_all") else source_numel
    return padded * itemsize
