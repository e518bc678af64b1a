"""The gradients that reach the outputs of a forward, as the lowered backward takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import InputError
from autopar.passes.local_program import LocalProgram
from autopar.passes.program import Output
from autopar.placement import Layout, from_dtensor, to_dtensor


class Tangents:
    """The tangents of one lowered program.

    Args:
        local: the program.
        outputs: the roles of the tensors that its forward returns to the caller, in order.
        device: of this rank.
    """

    def __init__(self, local: LocalProgram, outputs: Sequence[Output], device: torch.device) -> None:
        self._outputs, self._device = outputs, device
        self._roles = [role for role in local.inputs if role.kind == "tangent"]
        self._layouts = [local.input_layouts[role.node] for role in self._roles]
        self._vals: list[Tensor] = []
        if local.backward is not None:
            placeholders = [node for node in local.backward.graph.nodes if node.op == "placeholder"]
            self._vals = [node.meta["val"] for node in placeholders[local.num_saved :]]
        self.indices = {role.index for role in self._roles}

    def reached(self, gradients: Sequence[Tensor | None]) -> set[int | None]:
        """Return the indices of the outputs that a gradient reached."""
        return {role.index for role, gradient in zip(self._outputs, gradients) if gradient is not None}

    def named(self, reached: set[int | None]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the tangents of outputs that a gradient reached, and those of the others."""
        there = tuple(role.node for role in self._roles if role.index in reached)
        return there, tuple(role.node for role in self._roles if role.index not in reached)

    def local(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Return what the backward takes: this rank's pieces, zeros for an output that no gradient reached.

        Args:
            gradients: one an output.

        Raises:
            InputError: a gradient reached an output that is not differentiated.
        """
        by_index: dict[int | None, Tensor] = {}
        for output, gradient in zip(self._outputs, gradients):
            if gradient is None:
                continue
            if output.index not in self.indices:
                raise InputError(
                    f"a gradient reached the output {output.name}, but beside a loss only the loss is "
                    "differentiated; use outputs='full', put the term into the loss inside the module, or detach it"
                )
            by_index[output.index] = gradient
        out = []
        for role, layout, val in zip(self._roles, self._layouts, self._vals):
            given = by_index.get(role.index)
            if given is None:
                out.append(torch.zeros(val.shape, dtype=val.dtype, device=self._device))
            else:
                out.append(_piece(given, layout).to(val.dtype).resolve_conj().contiguous())
        return out


def _piece(gradient: Tensor, layout: Layout) -> Tensor:
    if not isinstance(gradient, DTensor):
        return gradient
    if from_dtensor(gradient.placements) != layout:
        gradient = gradient.redistribute(placements=to_dtensor(layout))
    return gradient.to_local()
