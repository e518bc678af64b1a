"""Gradients that reach outputs beside the loss: the call runs again as a program that differentiates every output.

Most steps want the gradient of the loss alone, so programs are planned for that. Whether a term outside of the module
reads another output is known only when a gradient comes back through it. Then, once, the call is traced and planned
again with all outputs differentiated, its forward runs again on the same tensors, random numbers and old buffers, and
its backward gives the gradients. Later calls of the same signature run by the wider program from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autopar.errors import InputError, LoweringError
from autopar.runtime.randomness import generator_state, set_generator_state

if TYPE_CHECKING:
    from autopar.runtime.execute import Executable

Widen = Callable[[], "Executable"]
"""Returns the executable of the same call that differentiates every output; made at the first time. Collective."""


@dataclass(frozen=True)
class Again:
    """What a forward leaves so that its call can run again.

    Attributes:
        names, tensors, versions: of its arguments; buffers that it updates as they were before.
        state: of the random generator where it began, None if it draws nothing.
        device: whose generator that is.
    """

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]
    state: Tensor | None
    device: torch.device

    @classmethod
    def of(cls, names: Sequence[str], tensors: Sequence[Tensor], device: torch.device, *, random: bool) -> Again:
        """Return it for a forward that is about to run."""
        state = generator_state(device) if random else None
        return cls(tuple(names), tuple(tensors), tuple(tensor._version for tensor in tensors), state, device)

    def gradients(self, wider: Executable, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return one gradient an argument, from those that reached the outputs. Collective.

        Raises:
            InputError: an argument was changed since.
        """
        for name, tensor, version in zip(self.names, self.tensors, self.versions):
            if tensor._version != version:
                raise InputError(
                    f"a gradient reached an output beside the loss, so the call has to run again, but {name} was "
                    "changed in place since; call backward first, or pass a copy"
                )
        if [slot.role.name for slot in wider.slots] != list(self.names):
            raise LoweringError("the program that differentiates every output takes other arguments than the first one")
        saved = self._forward(wider)
        return wider.run_backward(saved, gradients, wider.parameters_of(self.tensors))

    def _forward(self, wider: Executable) -> list[Tensor]:
        """Run the forward for what its backward needs; outputs and new values of buffers are there already."""
        if self.state is None:
            return wider.run_forward(wider.with_copies(self.tensors), [])[1]
        after = generator_state(self.device)
        set_generator_state(self.device, self.state)
        try:
            return wider.run_forward(wider.with_copies(self.tensors), [])[1]
        finally:
            set_generator_state(self.device, after)
