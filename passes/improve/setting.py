"""What the passes over a lowered program may know: nothing that differs between ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from autopar.errors import LoweringError
from autopar.mesh import Mesh
from autopar.placement import Layout

from ..cost.devices import Device, Link, device, mesh_links
from ..cost.join_links import join_links
from ..program import Input, Output
from .edits import Edit

Pass = Callable[[fx.GraphModule, "Setting"], list[Edit]]
"""Reads the lowered joint graph of the first rank, and says what to change in that of every rank."""


@dataclass(frozen=True)
class Setting:
    """What is known besides the graph.

    Attributes:
        mesh: of the plan.
        inputs, outputs: the roles.
        kept: ``(placeholder, layout)`` of gathered copies of parameters that are kept from step to step; the runtime
            gathers them apart.
        optimizer: whose state lies beside the parameters.
        memory_bytes: the budget of a rank, or None.
    """

    mesh: Mesh
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    kept: frozenset[tuple[str, Layout]] = frozenset()
    optimizer: str = "adamw"
    memory_bytes: int | None = None

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """The link of each axis."""
        return tuple(mesh_links(self.mesh))

    def group(self, axes: tuple[int, ...]) -> tuple[int, Link]:
        """Return how many ranks lie along some axes, and their link.

        Raises:
            LoweringError: the links do not say what the axes are together.
        """
        found = self.joined(axes)
        if found is None:
            raise LoweringError(f"a collective runs on the axes {axes} of {self.mesh}, whose links can't be joined")
        return math.prod(self.mesh.sizes[axis] for axis in axes), found

    def joined(self, axes: tuple[int, ...]) -> Link | None:
        """Return the link of some axes together; None where theirs do not tell."""
        ordered = sorted(axes)
        return join_links([self.links[axis] for axis in ordered], [self.mesh.sizes[axis] for axis in ordered])

    @cached_property
    def device(self) -> Device:
        """The device of a rank."""
        return device(self.mesh.device)
