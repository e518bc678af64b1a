"""The logical device grid: its axes, their names and their links. No process group is needed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import MeshError

Coordinate = tuple[int, ...]

PIPELINE_AXIS = "pp"
"""An axis of this name is the pipeline axis, unless a mesh says otherwise."""


def _is_whole(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool)


@dataclass(frozen=True)
class Mesh:
    """A grid of devices, named like a ``DeviceMesh``, but without processes.

    Args:
        sizes: ranks along each axis, the slowest axis first (ranks are numbered in row-major order).
        names: one name an axis; ``axis0``, ``axis1``, ... by default.
        device: the name of a device profile (``cpu``, ``a100``, ``h100``, ...).
        links: the name of a link profile for each axis; by default the device's own: between nodes for all axes but the
            last, inside a node for the last when it fits into one node.
        pipeline: the name of the pipeline axis, each of whose ranks has a part of the model of its own; empty for none.
            By default the axis called ``pp``, or else, where a plan is made for example inputs, the axis for which
            that is best, or none.

    >>> Mesh((2, 4), ("data", "model"), device="h100").num_ranks
    8
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...] = ()
    device: str = "cpu"
    links: tuple[str, ...] = ()
    pipeline: str | None = None

    def __post_init__(self) -> None:
        given: object = self.sizes
        if not isinstance(given, Sequence) or isinstance(given, str) or not all(map(_is_whole, given)):
            raise MeshError(f"the sizes of a mesh are whole numbers, one an axis, such as (2, 4); got {given!r}")
        sizes = tuple(int(n) for n in given)
        if not sizes or any(n < 1 for n in sizes):
            raise MeshError(f"a mesh needs at least one axis and every axis at least one rank; got {given}")
        for what, texts in (("names", self.names), ("links", self.links)):
            if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
                raise MeshError(f"{what}= takes one text an axis, such as ('slow', 'fast'); got {texts!r}")
        names = tuple(self.names) or tuple(f"axis{i}" for i in range(len(sizes)))
        if len(names) != len(sizes) or len(set(names)) != len(names):
            raise MeshError(f"a mesh of {len(sizes)} axes needs {len(sizes)} different names; got {names}")
        if self.links and len(self.links) != len(sizes):
            raise MeshError(f"a mesh of {len(sizes)} axes needs {len(sizes)} links; got {self.links}")
        allowed = (PIPELINE_AXIS,) if PIPELINE_AXIS in names else ("", *names)
        if self.pipeline is not None and self.pipeline not in allowed:
            raise MeshError(
                f"pipeline={self.pipeline!r} can't be that of a mesh with axes {', '.join(names)}; use one "
                f"of {', '.join(map(repr, allowed))}, or leave it out"
            )
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "links", tuple(self.links))

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh, device: str | None = None) -> Mesh:
        """Return the grid of a torch ``DeviceMesh``; its device profile is ``device`` or its device type's default."""
        names = tuple(mesh.mesh_dim_names or ())
        profile = device or ("cpu" if mesh.device_type == "cpu" else "h100")
        return cls(tuple(mesh.mesh.shape), names, profile)

    @property
    def num_axes(self) -> int:
        """The number of axes."""
        return len(self.sizes)

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    @property
    def pipeline_axis(self) -> int | None:
        """The index of the pipeline axis, or None."""
        name = PIPELINE_AXIS if self.pipeline is None else self.pipeline
        return self.names.index(name) if name in self.names else None

    def axis(self, name: str) -> int:
        """Return the index of the axis called ``name``."""
        if name not in self.names:
            raise MeshError(f"the mesh has no axis {name!r}; its axes are {', '.join(self.names)}")
        return self.names.index(name)

    def coordinate(self, rank: int) -> Coordinate:
        """Return the coordinate of a rank, in row-major order."""
        if not 0 <= rank < self.num_ranks:
            raise MeshError(f"rank {rank} is outside a mesh of {self.num_ranks} ranks")
        out = []
        for size in reversed(self.sizes):
            out.append(rank % size)
            rank //= size
        return tuple(reversed(out))

    def rank(self, coordinate: Sequence[int]) -> int:
        """Return the rank at a coordinate."""
        rank = 0
        for size, index in zip(self.sizes, coordinate, strict=True):
            rank = rank * size + index
        return rank

    def coordinates(self) -> Iterator[Coordinate]:
        """Yield every coordinate in rank order."""
        return product(*(range(n) for n in self.sizes))

    def group(self, coordinate: Sequence[int], axis: int) -> list[int]:
        """Return the ranks of the group along ``axis`` that the rank at ``coordinate`` is in, in order."""
        return [self.rank([*coordinate[:axis], index, *coordinate[axis + 1 :]]) for index in range(self.sizes[axis])]

    def __str__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes))
        return f"Mesh({axes}, device={self.device})"
