"""``autopar::random_state`` and ``autopar::set_random_state``: what an op drew in the forward is drawn again later.

A random op that is computed again in the backward stands between two settings of the default generator: to the state
that it had in the forward, and back to what it was.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .library import LIBRARY

CPU_STATE_BYTES = 5056
"""Bytes of the state of torch's CPU generator (a Mersenne twister)."""
CUDA_STATE_BYTES = 16

LIBRARY.define("random_state(Device device) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.define("set_random_state(Tensor state, Device device) -> ()", tags=(torch.Tag.pt2_compliant_tag,))


def random_state_bytes(device: str) -> int:
    """Return the bytes of one saved state for a device profile; only ``cpu`` has the long one."""
    return CPU_STATE_BYTES if device == "cpu" else CUDA_STATE_BYTES


def _read(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _write(state: Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _fake_read(device: torch.device) -> Tensor:
    return torch.empty(CUDA_STATE_BYTES if device.type == "cuda" else CPU_STATE_BYTES, dtype=torch.uint8)


def _fake_write(state: Tensor, device: torch.device) -> None:
    return None


torch.library.register_fake("autopar::random_state", _fake_read, lib=LIBRARY)
torch.library.impl("autopar::random_state", "default", _read, lib=LIBRARY)
torch.library.register_fake("autopar::set_random_state", _fake_write, lib=LIBRARY)
torch.library.impl("autopar::set_random_state", "default", _write, lib=LIBRARY)
