"""What the passes over a lowered program may know: nothing that differs between ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from autopar.mesh import Mesh
from autopar.placement import Layout

from ..cost.devices import Device, Link, device, mesh_links
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

    @cached_property
    def device(self) -> Device:
        """The device of a rank."""
        return device(self.mesh.device)
