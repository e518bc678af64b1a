"""Random numbers: every rank draws from the first rank's generator state, so that dropout is that of one device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from autopar.passes.program import Program, is_random
from autopar.runtime.agree import share_bytes
from autopar.runtime.groups import MeshGroups


def draws_randomness(program: Program) -> bool:
    """Tell whether a program draws random numbers."""
    return any(getattr(node.meta.get("rule"), "random", False) or is_random(node) for node in program.ops())


@contextmanager
def shared_randomness(groups: MeshGroups, keep_own: bool) -> Iterator[None]:
    """Run with the first rank's state of the device's default generator. Collective.

    Args:
        groups: the processes.
        keep_own: give the other ranks their own state back afterwards (they draw their own shares of the data);
            otherwise they go on from the first rank's, as copies of one script do.
    """
    mine = generator_state(groups.device)
    shared = share_bytes(groups.control, mine.numpy().tobytes() if groups.rank == 0 else None)
    set_generator_state(groups.device, torch.frombuffer(bytearray(shared), dtype=torch.uint8))
    try:
        yield
    finally:
        if keep_own and groups.rank != 0:
            set_generator_state(groups.device, mine)


def generator_state(device: torch.device) -> torch.Tensor:
    """Return the state of a device's default generator."""
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device.type).get_rng_state(device)  # type: ignore[no-any-return]


def set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    """Set the state of a device's default generator."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device.type).set_rng_state(state, device)
