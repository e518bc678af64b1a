"""``autopar::bernoulli``: a piece of the 0/1 mask that dropout draws on one device.

The whole mask is drawn from the default generator, then cut, so that a rank's randomness is a function of the global
element and a split program drops what an unsplit one drops. ``p`` is the probability of a one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .library import LIBRARY

LIBRARY.define(
    "bernoulli(SymInt[] shape, float p, ScalarType dtype, Device device, int[] offset, int[] length) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded),
)


def _fake(
    shape: Sequence[int], p: float, dtype: torch.dtype, device: torch.device, offset: list[int], length: list[int]
) -> Tensor:
    return torch.empty(length, dtype=dtype, device=device)


def kernel(
    shape: Sequence[int], p: float, dtype: torch.dtype, device: torch.device, offset: list[int], length: list[int]
) -> Tensor:
    """Draw the whole mask and return its piece."""
    whole = torch.empty(shape, dtype=dtype, device=device)
    if whole.device.type == "cuda" and 0.0 < p < 1.0 and whole.numel() > 0:
        # Eager dropout is one fused kernel there, with its own way of counting through the generator's stream.
        whole = torch.native_dropout(whole.zero_(), 1.0 - p, True)[1].to(dtype)
    else:
        whole.bernoulli_(p)
    piece = whole[tuple(slice(start, start + size) for start, size in zip(offset, length, strict=True))]
    return piece if list(length) == list(shape) else piece.clone(memory_format=torch.contiguous_format)


torch.library.register_fake("autopar::bernoulli", _fake, lib=LIBRARY)
torch.library.impl("autopar::bernoulli", "default", kernel, lib=LIBRARY)
