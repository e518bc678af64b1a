"""Seconds of an op on one device: a roofline and the launch of its kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from ..rules.rule import Rule
from .devices import Device

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
    return str(getattr(target, "overloadpacket", target)) in VIEWS


def op_seconds(target: Any, flops: Numbers, bytes_moved: Numbers, dtype: str, device: Device) -> Numbers:
    """Return the seconds of one op on its local tensors; views are free.

    Args:
        target: the op.
        flops: of the local piece; 0 for an op bound by memory traffic.
        bytes_moved: all local operands and results together.
        dtype: name of the dtype that it computes in (``bfloat16``).
        device: where it runs.
    """
    if is_view(target):
        return flops * 0.0
    times = np.maximum(flops / device.flops_per_s(dtype), bytes_moved / device.memory_bytes_per_s)
    return times + device.launch_s  # type: ignore[no-any-return]


def local_flops(rule: Rule, operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]]) -> float:
    """Return the flops of an op on local operands and results of these shapes."""
    share = 1.0
    sizes = {factor.name: factor.size for factor in rule.factors}
    seen: set[str] = set()
    for dims, shape in zip((*rule.operands, *rule.results), (*operands, *results), strict=True):
        for name, size in zip(dims, shape, strict=True):
            if name is not None and name not in seen and sizes[name]:
                seen.add(name)
                share *= size / sizes[name]
    return rule.flops * share


def compute_dtype(values: Sequence[torch.Tensor]) -> str:
    """Return the name of the dtype that an op on these values computes in: the narrowest floating point one."""
    floats = sorted((value.dtype.itemsize, str(value.dtype)) for value in values if value.dtype.is_floating_point)
    return floats[0][1].removeprefix("torch.") if floats else "float32"
