"""Ops of a program that runs once a micro-batch: its part of the batch, and what is meant over all micro-batches.

``index`` is a 0-dim integer tensor on the CPU, the number of the micro-batch; a program has it as an input.

- ``micro_batch`` cuts the part that belongs to the micro-batch out of a tensor of the whole batch;
- ``bernoulli_part`` is ``bernoulli`` whose piece moves by ``step`` along ``dim`` from one micro-batch to the next;
- ``over_micro_batches`` marks a value of one micro-batch of which the reduction over all is meant (``sum``, ``max``,
  ``min``, ``product``), or which is the ``same`` in all, and ``join_micro_batches`` one of which the concatenation is
  meant. Who runs the program accumulates what goes in, and hands out the whole when the last micro-batch is done; run
  by themselves they see one micro-batch alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .library import LIBRARY

_TAGS = (torch.Tag.pt2_compliant_tag,)

LIBRARY.define("micro_batch(Tensor x, Tensor index, int dim, int parts) -> Tensor", tags=_TAGS)
LIBRARY.define("over_micro_batches(Tensor x, str op) -> Tensor", tags=_TAGS)
LIBRARY.define("join_micro_batches(Tensor x, int dim, int parts) -> Tensor", tags=_TAGS)
LIBRARY.define(
    "bernoulli_part(Tensor index, SymInt[] shape, float p, ScalarType dtype, Device device, int[] offset, "
    "int[] length, int dim, int step) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded),
)


def _part_shape(x: Tensor, dim: int, parts: int) -> list[int]:
    return [size // parts if i == dim else size for i, size in enumerate(x.shape)]


def _fake_part(x: Tensor, index: Tensor, dim: int, parts: int) -> Tensor:
    return x.new_empty(_part_shape(x, dim, parts))


def _part(x: Tensor, index: Tensor, dim: int, parts: int) -> Tensor:
    length = x.shape[dim] // parts
    return x.narrow(dim, int(index) * length, length).clone(memory_format=torch.contiguous_format)


def _fake_bernoulli(
    index: Tensor,
    shape: Sequence[int],
    p: float,
    dtype: torch.dtype,
    device: torch.device,
    offset: list[int],
    length: list[int],
    dim: int,
    step: int,
) -> Tensor:
    return torch.empty(length, dtype=dtype, device=device)


def _bernoulli(
    index: Tensor,
    shape: Sequence[int],
    p: float,
    dtype: torch.dtype,
    device: torch.device,
    offset: list[int],
    length: list[int],
    dim: int,
    step: int,
) -> Tensor:
    start = [at + int(index) * step * (i == dim) for i, at in enumerate(offset)]
    return torch.ops.autopar.bernoulli(shape, p, dtype, device, start, length)  # type: ignore[no-any-return]


def _same(x: Tensor, op: str) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _fake_same(x: Tensor, op: str) -> Tensor:
    return x.new_empty(x.shape)


def _fake_join(x: Tensor, dim: int, parts: int) -> Tensor:
    return x.new_empty([size * parts if i == dim else size for i, size in enumerate(x.shape)])


def _join(x: Tensor, dim: int, parts: int) -> Tensor:
    return torch.cat([x] * parts, dim)


torch.library.register_fake("autopar::micro_batch", _fake_part, lib=LIBRARY)
torch.library.impl("autopar::micro_batch", "default", _part, lib=LIBRARY)
torch.library.register_fake("autopar::bernoulli_part", _fake_bernoulli, lib=LIBRARY)
torch.library.impl("autopar::bernoulli_part", "default", _bernoulli, lib=LIBRARY)
torch.library.register_fake("autopar::over_micro_batches", _fake_same, lib=LIBRARY)
torch.library.impl("autopar::over_micro_batches", "default", _same, lib=LIBRARY)
torch.library.register_fake("autopar::join_micro_batches", _fake_join, lib=LIBRARY)
torch.library.impl("autopar::join_micro_batches", "default", _join, lib=LIBRARY)
