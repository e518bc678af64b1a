"""The lowered program of one rank: local shapes, collectives inside.

A collective in the graph is an op of ``torch.ops._c10d_functional`` followed by ``wait_tensor``; its group argument is
the string ``axis:<index>``, or ``axis:<index>+<index>`` for all ranks along both (``group_word``), which the runtime
replaces by the name of the process group along that axis or those axes. The node sequence (names, ops, order) is the
same on every rank; constants (local sizes, offsets) may differ.

Besides ``val`` (a meta tensor of the local shape), ``phase``, ``module`` and ``source``, nodes carry
``meta["origin"]`` (the name of the global node they come from) and, where they hold all of one global tensor's piece,
``meta["tensor"]`` and ``meta["layout"]``. Collectives carry ``meta["reason"]``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from autopar.mesh import Coordinate, Mesh
from autopar.passes.program import Input, Output
from autopar.placement import Layout

GROUP_PREFIX = "axis:"


def group_word(axes: Iterable[int]) -> str:
    """Return the group argument of a collective along some axes of the mesh.

    >>> group_word([2, 0])
    'axis:0+2'
    """
    return GROUP_PREFIX + "+".join(map(str, sorted(axes)))


def group_axes(word: object) -> tuple[int, ...]:
    """Return the axes of a group argument, ascending; the inverse of ``group_word``."""
    return tuple(int(axis) for axis in str(word).removeprefix(GROUP_PREFIX).split("+"))


@dataclass
class LocalProgram:
    """What one rank runs.

    Attributes:
        joint: forward and backward in one graph, in order; its output is the flat tuple of ``outputs``.
        forward: the forward half: takes the non-tangent placeholders; returns output leaves and new buffer values in
            ``outputs`` order (elements whose node is None are left out), then the saved tensors.
        backward: the backward half: takes the saved tensors, then the tangents; returns the gradients in ``outputs``
            order (those whose node is None are left out). None for a forward-only program.
        inputs, outputs: the program's roles.
        input_layouts: placeholder name -> layout in which it is passed.
        output_layouts: one an element of ``outputs``; None for constants and missing gradients.
        num_saved: how many tensors the forward hands to the backward.
        mesh: the mesh.
        coordinate: the rank's place on it.
    """

    joint: fx.GraphModule
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    input_layouts: dict[str, Layout]
    output_layouts: tuple[Layout | None, ...]
    num_saved: int
    mesh: Mesh
    coordinate: Coordinate
