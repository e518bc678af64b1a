"""Seconds of an op on one device: a roofline and the launch of its kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from ..rules.rule import Rule
from .devices import Device
from .matmul import Product, product_seconds

Numbers = TypeVar("Numbers", float, "np.ndarray[Any, Any]")

_aten = torch.ops.aten

VIEWS: frozenset[str] = frozenset(
    str(packet)
    for packet in (
        _aten.view,
        _aten._unsafe_view,
        _aten.reshape,
        _aten.expand,
        _aten.permute,
        _aten.transpose,
        _aten.t,
        _aten.unsqueeze,
        _aten.squeeze,
        _aten.slice,
        _aten.select,
        _aten.split,
        _aten.split_with_sizes,
        _aten.unbind,
        _aten.alias,
        _aten.detach,
        _aten.as_strided,
        _aten.diagonal,
        _aten.movedim,
        _aten.unfold,
    )
)
"""Ops that move no data: they cost nothing."""


def is_view(target: Any) -> bool:
    """Tell whether an op only looks at its operand in another way."""
    return _name(target) in VIEWS


ATTENTION_SHARE = 0.62
"""The part of a device's achievable matmul rate that fused attention reaches (docs/costs.md)."""

KINDS: dict[str, str] = {
    "autopar.attention": "attention",
    "autopar.attention_backward": "attention",
    "aten.convolution": "convolution",
    "aten.convolution_backward": "convolution",
}
"""Ops whose kernels reach another part of a device's achievable rate than plain products -> their kind."""


def share_of(target: Any, device: Device) -> float:
    """Return the part of the achievable rate that an op's kernels reach: the profile's own, or the usual one."""
    kind = KINDS.get(_name(target), "")
    return device.shares.get(kind, ATTENTION_SHARE if kind == "attention" else 1.0)


def call_seconds(target: Any, device: Device) -> float:
    """Return what an op takes besides its work, where it starts a kernel; of a view what the host takes for it."""
    return device.view_s if is_view(target) else device.calls.get(_name(target), device.launch_s)


def _name(target: Any) -> str:
    return str(getattr(target, "overloadpacket", target))


def op_seconds(
    target: Any,
    flops: Numbers,
    bytes_moved: Numbers,
    dtype: str,
    device: Device,
    *,
    product: Product | None = None,
    launches: float = 1.0,
    drawn: float = 0.0,
) -> Numbers:
    """Return the seconds of one op on its local tensors; views cost a call at most.

    Args:
        target: the op.
        flops: of the local piece; 0 for an op bound by memory traffic.
        bytes_moved: all local operands and results together, without those that a fused kernel keeps to itself.
        dtype: name of the dtype that it computes in (``bfloat16``).
        device: where it runs.
        product: the local sizes if it is a matrix product.
        launches: kernels started: 0 for an op that runs in the kernel of another one.
        drawn: random numbers drawn.
    """
    if is_view(target):
        return flops * 0.0 + device.view_s
    launch_s = launches * call_seconds(target, device) + drawn * device.draw_s
    share = share_of(target, device)
    if product is not None:
        return product_seconds(product, bytes_moved, dtype, device) / share + launch_s  # type: ignore[return-value,arg-type]
    rate = device.flops_per_s(dtype) * share
    times = np.maximum(flops / rate, device.stream_seconds(bytes_moved) / device.shares.get(_name(target), 1.0))
    return times + launch_s  # type: ignore[no-any-return]


def numbers_drawn(rule: Rule, results: Sequence[torch.Tensor]) -> float:
    """Return how many random numbers an op draws on every rank: those of the whole tensor, of which it keeps a piece.

    Args:
        rule: of the op.
        results: tensors of the global shapes.
    """
    return float(sum(value.numel() for value in results)) if rule.random else 0.0


def product_of(rule: Rule, lengths: Mapping[str, np.ndarray[Any, Any]]) -> Product | None:
    """Return the local sizes of an op that is a matrix product, else None.

    The factors that only the first operand and the result have make up ``m``, those of the second ``n``, those of both
    operands alone ``k``, and those of all three the batch. An op that computes more than that is none, such as a
    convolution: its pixels and its kernel are no factors.

    Args:
        rule: of the op.
        lengths: local length of every factor, an entry a strategy.
    """
    if not rule.flops or len(rule.results) != 1 or len(rule.operands) not in (2, 3):
        return None
    if rule.flops > 2.0 * math.prod(factor.size for factor in rule.factors):
        return None
    pair = rule.operands[:2] if len(rule.operands) == 3 and len(rule.operands[2]) == 1 else rule.operands[-2:]
    first, second = ({name for name in dims if name is not None} for dims in pair)
    result = {name for name in rule.results[0] if name is not None}
    if not result <= first | second or not first & second - result:
        return None
    one = np.ones(np.shape(next(iter(lengths.values()))))

    def size(names: set[str]) -> np.ndarray[Any, Any]:
        total = one
        for name in sorted(names):
            total = total * np.maximum(1, lengths[name])
        return total

    shared = first & second
    rows = size({name for name in pair[0][-1:] if name}), size({name for name in pair[1][-1:] if name})
    return Product(size(shared & result), size(first - second), size(second - first), size(shared - result), rows)


Shapes = Sequence[Sequence[int]]


def local_lengths(rule: Rule, local_shapes: Shapes, global_shapes: Shapes) -> dict[str, float]:
    """Return the local length of every factor of an op, read off its local tensors.

    Args:
        rule: of the op.
        local_shapes, global_shapes: of all operands and then all results.
    """
    sizes = {factor.name: float(factor.size) for factor in rule.factors}
    out = dict(sizes)
    for dims, local, whole in zip((*rule.operands, *rule.results), local_shapes, global_shapes, strict=True):
        for name, length, size in zip(dims, local, whole, strict=True):
            if name is not None and size and out[name] == sizes[name]:
                out[name] = sizes[name] * length / size
    return out


def local_seconds(
    target: Any, rule: Rule, lengths: Mapping[str, float], bytes_moved: float, dtype: str, device: Device, **how: float
) -> float:
    """Return the seconds of an op whose factors have these local ``lengths``; ``how`` as in ``op_seconds``."""
    flops = rule.flops
    for factor in rule.factors:
        flops *= factor.work_share(lengths[factor.name])
    product = product_of(rule, {name: np.array([length]) for name, length in lengths.items()})
    moved = np.array([bytes_moved])
    seconds = op_seconds(target, np.array([flops]), moved, dtype, device, product=product, **how)
    return float(seconds[0])


def compute_dtype(values: Sequence[torch.Tensor]) -> str:
    """Return the name of the dtype that an op on these values computes in: the narrowest floating point one."""
    floats = sorted((value.dtype.itemsize, str(value.dtype)) for value in values if value.dtype.is_floating_point)
    return floats[0][1].removeprefix("torch.") if floats else "float32"
