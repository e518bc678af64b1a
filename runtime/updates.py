"""What a call changes in place: buffers of the module, and inputs that the model writes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.errors import InputError
from autopar.passes.program import Program


class Updates:
    """The tensors that a program has new values for.

    Attributes:
        nodes: their placeholders.
    """

    def __init__(self, program: Program) -> None:
        self._roles = [role for role in program.outputs if role.kind == "buffer" and role.node is not None]
        self.nodes = frozenset(role.of for role in self._roles)
        self._inputs = {
            role.node: role.index for role in program.inputs if role.kind == "input" and role.node in self.nodes
        }

    def require_own_memory(self, leaves: Sequence[Any]) -> None:
        """Check that an input that is written to shares its memory with no other: a program takes each as its own.

        Raises:
            InputError: writing to one would change another, of which the program would not know.
        """
        for position in self._inputs.values():
            memory = leaves[position].untyped_storage().data_ptr()
            for other, leaf in enumerate(leaves):
                if other != position and isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() == memory != 0:
                    raise InputError(
                        f"the model writes into the input tensor number {position}, which shares its memory with "
                        f"number {other}: pass a copy (x.clone()) of one of them"
                    )

    def write(self, values: Sequence[Tensor], buffers: Mapping[str, Tensor], leaves: Sequence[Any]) -> None:
        """Put the new values, in the order of the program's outputs, into buffers (by full name) and inputs."""
        with torch.no_grad():
            for role, value in zip(self._roles, values, strict=True):
                (leaves[self._inputs[role.of]] if role.of in self._inputs else buffers[role.name]).copy_(value)
