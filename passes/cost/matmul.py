"""Seconds of a matrix product on one device, by its shape: tiles, waves of tiles, and the memory that it streams.

A product of ``m x k`` by ``k x n`` is cut into tiles of the result, of which a device runs ``num_units`` at once; the
last wave is as long as a full one, a tile pays for the padding of its edge and for ``START_DEPTH`` more columns of
``k`` to fill its pipeline. The cheapest tile counts, as a library's heuristic would choose; with few tiles ``k`` is
cut too.
Constants are fitted to published measurements on four devices (``docs/costs.md``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .devices import Device

Numbers = np.ndarray[Any, Any]

TILES: tuple[tuple[int, int, float], ...] = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.93),
    (128, 64, 0.77),
    (64, 128, 0.77),
    (64, 64, 0.63),
)
"""Rows and columns of a tile of the result, and the share of the device's achievable rate that it reaches."""

DEPTH_CUTS = (1, 2, 4, 8)
"""Into how many parts ``k`` may be cut."""

DEPTH_STEP = 32
START_DEPTH = 150.0
START_S = 2e-6
MISALIGNED: dict[int, float] = {8: 1.0, 4: 1.14, 2: 1.14, 1: 2.66}
"""Largest power of two (at most 8) that divides the rows of both operands in memory -> how much longer a 16 bit product
takes."""


@dataclass(frozen=True, eq=False)
class Product:
    """The local sizes of a batch of products, one entry a strategy.

    Attributes:
        rows: lengths of the operands' last dims, which lie together in memory; ``(k, n)`` for plain ones.
    """

    batch: Numbers
    m: Numbers
    n: Numbers
    k: Numbers
    rows: tuple[Numbers, Numbers] | None = None

    @property
    def flops(self) -> Numbers:
        """Multiplications and additions."""
        return 2.0 * self.batch * self.m * self.n * self.k


def product_seconds(product: Product, bytes_moved: Numbers, dtype: str, device: Device) -> Numbers:
    """Return the seconds of products without their launch.

    Args:
        product: local sizes.
        bytes_moved: operands and results.
        dtype: name of the dtype that it computes in.
        device: where it runs.
    """
    rate = device.flops_per_s(dtype) / device.num_units
    best = np.full(np.shape(product.m), np.inf)
    for rows, columns, share in TILES:
        tiles = product.batch * np.ceil(product.m / rows) * np.ceil(product.n / columns)
        for cuts in DEPTH_CUTS:
            depth = np.ceil(product.k / cuts / DEPTH_STEP) * DEPTH_STEP + START_DEPTH
            seconds = np.ceil(tiles * cuts / device.num_units) * (2.0 * rows * columns) * depth / (rate * share)
            if cuts > 1:
                partial_bytes = 2.0 * cuts * product.batch * product.m * product.n * 4
                seconds = seconds + partial_bytes / device.stream_bytes_per_s
            best = np.minimum(best, seconds)
    if device.num_units == 1:
        best = product.flops * (1.0 + START_DEPTH / 4 / product.k) / device.flops_per_s(dtype)
    elif dtype in ("float16", "bfloat16"):
        best = best * _misalignment(*(product.rows or (product.n, product.k)))
    return np.maximum(best, device.stream_seconds(bytes_moved)) + START_S  # type: ignore[no-any-return]


def _misalignment(first: Numbers, second: Numbers) -> Numbers:
    out = np.full(np.shape(first), MISALIGNED[1])
    for power in (2, 4, 8):
        out = np.where((first % power == 0) & (second % power == 0), MISALIGNED[power], out)
    return out
