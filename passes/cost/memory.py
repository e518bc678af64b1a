"""Bytes that a rank keeps during a step: parameters, gradients, optimizer state, buffers, saved activations."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import AutoparError

MOMENTS: dict[str, int] = {
    "sgd": 0,
    "momentum": 1,
    "adagrad": 1,
    "rmsprop": 1,
    "adam": 2,
    "adamw": 2,
}
"""Optimizer -> how many values it keeps for one parameter element."""

MOMENT_ITEMSIZE = 4
"""Bytes of one kept value: optimizers keep float32."""


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes that one parameter takes on one rank, by purpose."""

    parameter: int
    gradient: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameter + self.gradient + self.optimizer


def parameter_bytes(numel: int, itemsize: int, requires_grad: bool, optimizer: str) -> ParameterBytes:
    """Return the bytes of the local piece of a parameter; a frozen one has neither gradient nor state.

    Args:
        numel: elements of the piece.
        itemsize: bytes of an element.
        requires_grad: the parameter is trained.
        optimizer: a key of ``MOMENTS``.
    """
    if not requires_grad:
        return ParameterBytes(numel * itemsize, 0, 0)
    moment_itemsize = max(MOMENT_ITEMSIZE, itemsize)
    return ParameterBytes(numel * itemsize, numel * itemsize, num_moments(optimizer) * numel * moment_itemsize)


def num_moments(optimizer: str) -> int:
    """Return how many values an optimizer keeps for one parameter element.

    Raises:
        AutoparError: the optimizer is unknown.
    """
    if optimizer.lower() not in MOMENTS:
        raise AutoparError(f"the optimizer {optimizer!r} is unknown; known are {', '.join(sorted(MOMENTS))}")
    return MOMENTS[optimizer.lower()]
