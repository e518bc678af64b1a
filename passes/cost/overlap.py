"""How much a collective that travels behind compute slows that compute."""

from __future__ import annotations

from .devices import Device, Link

MEMORY_PASSES = 3.45
"""Bytes of device memory that pass for each byte on the wire: sent ones are read, received ones written and copied."""

UNITS_TAKEN = 0.067
"""What is left where the wire is slow: the part of the device that the collective's kernel keeps busy."""


def overlap_slowdown(link: Link, device: Device) -> float:
    """Return the part of a hidden collective's time by which it slows the compute that hides it.

    A collective takes memory bandwidth from what runs meanwhile: in proportion to the speed of its link beside that of
    the memory, at most all. Both constants are fitted to products that ran together with an all-gather on V100 and
    A100 over NVLink and over networks (the 234 cases of the Mist artifact's overlap profiles, github.com/Dazz993/Mist,
    whose gather takes 0.1 to 0.8 of the product's time; mean absolute error 0.04; see ``docs/costs.md``).

    Args:
        link: of the axis that the collective works along.
        device: what computes.

    >>> from .devices import device, link
    >>> round(overlap_slowdown(link("nvlink3"), device("a100-40gb")), 2)
    0.57
    >>> round(overlap_slowdown(link("ethernet_100"), device("a100-40gb")), 2)
    0.09
    """
    pace = min(link.bytes_per_s, link.inner.bytes_per_s) if link.inner is not None else link.bytes_per_s
    return min(1.0, UNITS_TAKEN + MEMORY_PASSES * pace / device.memory_bytes_per_s)
