"""Tell whether ranks hold pieces of unequal sizes."""

from __future__ import annotations

from torch import fx

from autopar.mesh import Mesh
from autopar.placement import local_shape

from .program import Program


def is_uneven(joint: fx.GraphModule, program: Program, mesh: Mesh) -> bool:
    """Return whether some tensor of a lowered graph is cut into unequal pieces. Every rank gets the same answer."""
    first, last = (0,) * mesh.num_axes, tuple(size - 1 for size in mesh.sizes)
    whole = program.nodes()
    held = {(node.meta["tensor"], node.meta["layout"]) for node in joint.graph.nodes if "layout" in node.meta}
    shapes = [(tuple(whole[name].meta["val"].shape), layout) for name, layout in held]
    return any(
        local_shape(shape, layout, mesh.sizes, first) != local_shape(shape, layout, mesh.sizes, last)
        for shape, layout in shapes
    )
