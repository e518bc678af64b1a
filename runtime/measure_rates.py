"""Measure how the ops of a CPU that are bound by memory differ from the stream that they are priced by.

Functions of every element, sums along a dimension, norms and look-ups run slower than an addition of as many bytes,
and some of them are several calls in one. Each is run on few elements, which shows its call, and on many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.passes import ops as _ops  # noqa: F401  (defines torch.ops.autopar)
from autopar.runtime.measure import Meter

CHANNELS = 64
FEW_ROWS, MANY_ROWS = 4, 2048
"""Rows of the tensors, of so many channels: where the call is all that counts, and where it counts little."""
PATIENCE_S = 0.3

_aten = torch.ops.aten
_own = torch.ops.autopar
Arguments = tuple[Any, ...]


def _rows(rows: int) -> Tensor:
    return torch.rand(rows, CHANNELS)


def _image(rows: int) -> Tensor:
    side = int((rows // 4) ** 0.5) or 1
    return torch.rand(rows // (side * side), CHANNELS, side, side)


def _tokens(rows: int) -> Tensor:
    return torch.arange(rows).flip(0)


def _normed(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return an image, and the mean, variance and scale of its channels."""
    image = _image(rows)
    return (image, *_own.statistics(_own.moments(image), image.numel() // CHANNELS, 1e-5, torch.float32))


def _layer_norm_backward(rows: int) -> Arguments:
    x, weight = _rows(rows), torch.ones(CHANNELS)
    _, mean, scale = _aten.native_layer_norm(x, [CHANNELS], weight, weight, 1e-5)
    return x, x, [CHANNELS], mean, scale, weight, weight, [True, True, True]


def _pool_backward(rows: int) -> Arguments:
    how = ([3, 3], [2, 2], [1, 1], [1, 1], False)
    image = _image(rows)
    made, where = _aten.max_pool2d_with_indices(image, *how)
    return made, image, *how, where


def _normalise(rows: int) -> Arguments:
    image, mean, variance, _ = _normed(rows)
    return image, torch.ones(CHANNELS), torch.ones(CHANNELS), mean, variance, 1e-5


def _normalise_sums(rows: int) -> Arguments:
    image, mean, _, scale = _normed(rows)
    return image, image, mean, scale


def _normalise_backward(rows: int) -> Arguments:
    image, mean, _, scale = _normed(rows)
    sums = _own.normalise_sums(image, image, mean, scale)
    return image, image, torch.ones(CHANNELS), mean, scale, sums, image.numel() // CHANNELS


OPS: dict[Any, Callable[[int], Arguments]] = {
    **dict.fromkeys(
        (
            *(_aten.exp, _aten.log, _aten.tanh, _aten.sigmoid, _aten.sqrt, _aten.rsqrt, _aten.reciprocal),
            *(_aten.relu, _aten.gelu, _aten.silu),
        ),
        lambda rows: (_rows(rows),),
    ),
    **dict.fromkeys(
        (_aten.mul, _aten.div, _aten.gelu_backward, _aten.silu_backward), lambda rows: (_rows(rows), _rows(rows))
    ),
    _aten.threshold_backward: lambda rows: (_rows(rows), _rows(rows), 0),
    _aten.pow: lambda rows: (_rows(rows), 2),
    _aten.masked_fill: lambda rows: (_rows(rows), _rows(rows) > 0.5, 0.0),
    _aten.where: lambda rows: (_rows(rows) > 0.5, _rows(rows), _rows(rows)),
    _aten.clone: lambda rows: (_rows(rows),),
    _aten.cat: lambda rows: ([_rows(rows), _rows(rows)], 1),
    _aten.slice_backward: lambda rows: (_rows(rows), [rows, 2 * CHANNELS], 1, 0, CHANNELS, 1),
    _aten.sum: lambda rows: (_rows(rows), [0]),
    _aten.mean: lambda rows: (_rows(rows), [1]),
    _aten.amax: lambda rows: (_rows(rows), [1]),
    _aten.native_layer_norm: lambda rows: (_rows(rows), [CHANNELS], torch.ones(CHANNELS), torch.ones(CHANNELS), 1e-5),
    _aten.native_layer_norm_backward: _layer_norm_backward,
    _aten.embedding: lambda rows: (_rows(rows), _tokens(rows)),
    _aten.embedding_dense_backward: lambda rows: (_rows(rows), _tokens(rows), rows, -1, False),
    _aten.max_pool2d_with_indices: lambda rows: (_image(rows), [3, 3], [2, 2], [1, 1]),
    _aten.max_pool2d_with_indices_backward: _pool_backward,
    _own.moments: lambda rows: (_image(rows),),
    _own.statistics: lambda rows: (torch.rand(2, rows).double() + 1.0, 2, 1e-5, torch.float32),
    _own.normalise: _normalise,
    _own.normalise_sums: _normalise_sums,
    _own.normalise_backward: _normalise_backward,
}
"""Ops that are measured -> their arguments on so many rows."""


def memory_rates(meter: Meter) -> dict[str, tuple[float, float, float]]:
    """Return op -> seconds of its call, and the bytes and seconds of moving much, without the call's."""
    out = {}
    for op, make in OPS.items():
        call_s, _ = _seconds(meter, op, make(FEW_ROWS))
        seconds, num_bytes = _seconds(meter, op, make(MANY_ROWS))
        out[str(op)] = (call_s, num_bytes, max(seconds - call_s, seconds / 10))
    return out


def _seconds(meter: Meter, op: Any, arguments: Arguments) -> tuple[float, float]:
    """Return the seconds of a call, and the bytes of what it reads and makes."""
    made = op(*arguments)
    num_bytes = sum(leaf.nbytes for leaf in pytree.tree_leaves((arguments, made)) if isinstance(leaf, Tensor))
    return meter.seconds(lambda: op(*arguments), PATIENCE_S), float(num_bytes)
