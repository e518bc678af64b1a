"""What a search knows of a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from .cost.devices import axis_links


@dataclass(frozen=True)
class Hardware:
    """Nodes of equal devices; ``autopar.Cluster`` in the words that passes may use."""

    num_nodes: int
    devices_per_node: int
    device: str
    link_inside: str
    link_between: str

    @property
    def num_ranks(self) -> int:
        """All devices."""
        return self.num_nodes * self.devices_per_node

    def links(self, sizes: tuple[int, ...]) -> tuple[str, ...]:
        """Return the link of every axis of a mesh of ``sizes`` on all devices."""
        return axis_links(sizes, self.devices_per_node, self.link_inside, self.link_between)

    def __str__(self) -> str:
        return f"{self.num_nodes}x{self.devices_per_node} {self.device}"
