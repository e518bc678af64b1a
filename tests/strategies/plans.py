"""Hypothesis strategies of meshes, layouts and legal plans."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from hypothesis import strategies as st

from autopar.mesh import Mesh
from autopar.passes.redistribution import layout_is_legal
from autopar.placement import PARTIAL_SUM, REPLICATE, Layout

MESHES = ((2,), (3,), (4,), (2, 2), (5,), (6,), (2, 3), (3, 2), (8,), (2, 4), (1, 3), (2, 1))
"""Meshes of 2 to 8 ranks, the simplest first."""


def meshes(limit: int = 8) -> st.SearchStrategy[Mesh]:
    """Draw a mesh of one or two axes and at most ``limit`` ranks."""
    options = [Mesh(sizes) for sizes in MESHES]
    return st.sampled_from([mesh for mesh in options if mesh.num_ranks <= limit])


def legal_layouts(shape: Sequence[int], mesh: Mesh, partials: Sequence[int] = ()) -> list[Layout]:
    """Return every layout of a tensor without empty pieces; axes may also hold one of ``partials``."""
    codes = [REPLICATE, *range(len(shape)), *partials]
    per_axis = [codes if size > 1 else [REPLICATE] for size in mesh.sizes]
    layouts = [layout for layout in product(*per_axis) if layout_is_legal(shape, layout, mesh.sizes)]
    return [layout for layout in layouts if len({code for code in layout if code <= PARTIAL_SUM}) <= 1]
