"""Clusters: nodes of equal devices, and the logical meshes that lie on them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from autopar.errors import MeshError
from autopar.mesh import Mesh
from autopar.passes.cost.devices import axis_links, device, link
from autopar.passes.hardware import Hardware

_TEXT = re.compile(r"\s*(?:(\d+)\s*x\s*)?(\d+)\s+(\S+)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices, written ``"4x8 h100"``: four nodes of eight; ``"8 a100"`` is one node.

    Args:
        text: nodes, devices per node and the name of a device profile.
        link_inside: link profile inside a node; the device's usual one by default.
        link_between: link profile between nodes; the device's usual one by default.

    Raises:
        MeshError: the text can't be read, or a profile is unknown.

    >>> Cluster("4x8 h100").mesh().links
    ('infiniband_400', 'nvlink4')
    """

    text: str
    link_inside: str = ""
    link_between: str = ""

    def __post_init__(self) -> None:
        match = _TEXT.fullmatch(self.text)
        if match is None or not int(match.group(1) or 1) or not int(match.group(2)):
            raise MeshError(
                f"{self.text!r} is no cluster; write nodes x devices and the device, such as '4x8 h100', or '8 a100'"
            )
        profile = device(match.group(3))
        for field, default in (("link_inside", profile.link_inside), ("link_between", profile.link_between)):
            object.__setattr__(self, field, getattr(self, field) or default)
            link(getattr(self, field))

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        match = _TEXT.fullmatch(self.text)
        assert match is not None
        return int(match.group(1) or 1)

    @property
    def devices_per_node(self) -> int:
        """The number of devices of a node."""
        match = _TEXT.fullmatch(self.text)
        assert match is not None
        return int(match.group(2))

    @property
    def device(self) -> str:
        """The name of the device profile."""
        match = _TEXT.fullmatch(self.text)
        assert match is not None
        return match.group(3)

    @property
    def num_ranks(self) -> int:
        """The number of devices."""
        return self.num_nodes * self.devices_per_node

    @property
    def hardware(self) -> Hardware:
        """The cluster in the words of the search."""
        return Hardware(self.num_nodes, self.devices_per_node, self.device, self.link_inside, self.link_between)

    def mesh(self, sizes: tuple[int, ...] | None = None, names: tuple[str, ...] = ()) -> Mesh:
        """Return a logical mesh on all devices, every axis with the link that it uses.

        Args:
            sizes: of the axes, the slowest first; by default nodes and devices, without an axis of one rank.
            names: of the axes; ``node`` and ``device`` for the default sizes.

        Raises:
            MeshError: the sizes don't multiply to the number of devices.
        """
        if sizes is None:
            axes = [(n, name) for n, name in ((self.num_nodes, "node"), (self.devices_per_node, "device")) if n > 1]
            axes = axes or [(1, "device")]
            sizes, names = tuple(n for n, _ in axes), names or tuple(name for _, name in axes)
        if math.prod(sizes) != self.num_ranks:
            raise MeshError(f"{self} has {self.num_ranks} devices; a mesh of {sizes} needs {math.prod(sizes)}")
        links = axis_links(tuple(sizes), self.devices_per_node, self.link_inside, self.link_between)
        return Mesh(tuple(sizes), names, self.device, links)

    def __str__(self) -> str:
        return self.text.strip()
