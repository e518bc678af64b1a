"""Errors: each says what was asked, what was found and what to do."""

from __future__ import annotations


class AutoparError(Exception):
    """The base of every error that autopar raises on purpose."""


class MeshError(AutoparError):
    """A mesh that does not exist, does not fit the world, or names unknown axes."""


class OptionError(AutoparError):
    """An option (memory, optimizer, inputs, outputs, ...) with a value that means nothing."""


class CaptureError(AutoparError):
    """A model that can't be traced whole, or example inputs that do not fit it."""


class RuleError(AutoparError):
    """A sharding rule that contradicts its op."""


class ConstraintError(AutoparError):
    """A constraint that matches nothing, or that the op can't satisfy."""


class InfeasibleError(AutoparError):
    """No plan exists within the memory budget; ``least_bytes`` is the smallest that is known to have one."""

    def __init__(self, message: str, least_bytes: int | None = None) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


class PlanError(AutoparError):
    """A plan that is malformed, of a newer schema, or made for another model or mesh."""


class LoweringError(AutoparError):
    """A plan that can't be turned into a local program."""


class MismatchError(AutoparError):
    """A plan whose program does not compute what one device computes."""


class InputError(AutoparError):
    """Inputs to a parallel module that differ from what its plan or the other ranks expect."""
