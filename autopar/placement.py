"""Placements and layouts: where the pieces of a tensor lie on a mesh.

Inside the compiler a placement is a small int, which is fast to compare and to put into arrays:
``Shard(dim)`` is ``dim`` (>= 0), ``REPLICATE`` is -1, a partial value is one of the negative ints of ``PARTIAL``.
A layout is one placement for each mesh axis. When several axes split one dim, the earlier axis is the outer one,
and every cut is the one of ``torch.chunk`` (pieces of ``ceil(size / parts)``, the last ones shorter or empty):
both are DTensor's convention, so a layout is exactly a list of DTensor placements.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.errors import PlanError

Layout = tuple[int, ...]

REPLICATE = -1
PARTIAL: dict[str, int] = {"sum": -2, "max": -3, "min": -4, "product": -5}
PARTIAL_NAMES: dict[int, str] = {code: name for name, code in PARTIAL.items()}
PARTIAL_SUM = PARTIAL["sum"]


def is_shard(code: int) -> bool:
    """Tell whether a placement code is a shard; its value is then the dim."""
    return code >= 0


def is_partial(code: int) -> bool:
    """Tell whether a placement code is a partial value."""
    return code <= PARTIAL_SUM


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return ``(offset, length)`` of piece ``index`` when ``size`` is cut into ``parts`` as ``torch.chunk`` cuts.

    >>> [chunk(5, 4, i) for i in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    step = -(-size // parts)
    start = min(size, step * index)
    return start, min(size, start + step) - start


def local_range(size: int, cuts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return ``(offset, length)`` after the nested cuts ``(parts, index)``, the outermost first.

    >>> local_range(10, [(2, 1), (2, 1)])
    (8, 2)
    """
    offset = 0
    for parts, index in cuts:
        start, size = chunk(size, parts, index)
        offset += start
    return offset, size


def dim_cuts(layout: Layout, dim: int, sizes: Sequence[int], coordinate: Sequence[int]) -> list[tuple[int, int]]:
    """Return the ``(parts, index)`` cuts of ``dim`` under ``layout``, the outermost first."""
    return [(sizes[axis], coordinate[axis]) for axis, code in enumerate(layout) if code == dim]


def local_shape(
    shape: Sequence[int], layout: Layout, sizes: Sequence[int], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """Return the shape of the piece that the rank at ``coordinate`` of a mesh of ``sizes`` holds."""
    return tuple(local_range(n, dim_cuts(layout, dim, sizes, coordinate))[1] for dim, n in enumerate(shape))


def local_offset(
    shape: Sequence[int], layout: Layout, sizes: Sequence[int], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """Return where the piece of the rank at ``coordinate`` starts in the global tensor."""
    return tuple(local_range(n, dim_cuts(layout, dim, sizes, coordinate))[0] for dim, n in enumerate(shape))


def pieces_nonempty(size: int, parts: Sequence[int]) -> bool:
    """Tell whether no piece is empty when ``size`` is cut by ``parts``, the outermost first.

    A longer piece may leave an empty one where a shorter does not: 7 is cut into 4 and 3, and of three pieces of 4 one
    is empty.

    >>> pieces_nonempty(7, [2, 3]), pieces_nonempty(3, [3])
    (False, True)
    """
    lengths = {size}
    for count in parts:
        lengths = {chunk(length, count, index)[1] for length in lengths for index in (0, count - 1)}
        if 0 in lengths:
            return False
    return True


def code_name(code: int) -> str:
    """Return the short name of a placement: ``S0``, ``R``, ``P`` or ``P(max)``."""
    if code >= 0:
        return f"S{code}"
    if code == REPLICATE:
        return "R"
    return "P" if code == PARTIAL_SUM else f"P({PARTIAL_NAMES[code]})"


def layout_name(layout: Layout) -> str:
    """Return a layout as text, one placement an axis: ``S0,R``."""
    return ",".join(code_name(code) for code in layout)


def parse_layout(text: str) -> Layout:
    """Return the layout that ``layout_name`` wrote.

    Raises:
        PlanError: the text is not a layout.
    """
    codes = []
    for part in text.split(",") if text else []:
        if part == "R":
            codes.append(REPLICATE)
        elif part == "P":
            codes.append(PARTIAL_SUM)
        elif part.startswith("P(") and part.endswith(")") and part[2:-1] in PARTIAL:
            codes.append(PARTIAL[part[2:-1]])
        elif part.startswith("S") and part[1:].isdecimal():
            codes.append(int(part[1:]))
        else:
            raise PlanError(f"{part!r} in the layout {text!r} is no placement; write S<dim>, R, P or P(<op>)")
    return tuple(codes)


def to_dtensor(layout: Layout) -> tuple[Placement, ...]:
    """Return the DTensor placements of a layout."""
    return tuple(
        Shard(code) if code >= 0 else Replicate() if code == REPLICATE else Partial(PARTIAL_NAMES[code])
        for code in layout
    )


def from_dtensor(placements: Sequence[Placement]) -> Layout:
    """Return the layout of DTensor placements."""
    codes = []
    for placement in placements:
        if isinstance(placement, Shard):
            codes.append(placement.dim)
        elif isinstance(placement, Replicate):
            codes.append(REPLICATE)
        elif isinstance(placement, Partial):
            codes.append(PARTIAL[placement.reduce_op])
        else:
            raise PlanError(f"{placement} is no placement that autopar knows (Shard, Replicate, Partial)")
    return tuple(codes)
