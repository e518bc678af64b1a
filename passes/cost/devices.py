"""Device and link profiles: data with sources, read from JSON files beside this one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from types import MappingProxyType
from typing import Any

import msgspec

from autopar.errors import MeshError
from autopar.mesh import Mesh


@dataclass(frozen=True)
class Link:
    """What carries the messages of one mesh axis: a start-up time a message and a bandwidth one way."""

    name: str
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Device:
    """What computes: peak rates by dtype, the share of them that large kernels reach, and the memory.

    Attributes:
        peak_flops: dtype name -> floating point operations a second; other dtypes count as float32.
        achievable: the part of the peak that is reached.
        memory_bytes_per_s: bandwidth of the device memory.
        launch_s: overhead of one kernel.
        memory_bytes: capacity.
        devices_per_node: how many share the fast links.
        link_inside, link_between: the default links inside a node and between nodes.
    """

    name: str
    peak_flops: Mapping[str, float]
    achievable: float
    memory_bytes_per_s: float
    launch_s: float
    memory_bytes: int
    devices_per_node: int
    link_inside: str
    link_between: str
    flops_of: Mapping[str, float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        reached = {dtype: peak * self.achievable for dtype, peak in self.peak_flops.items()}
        object.__setattr__(self, "flops_of", MappingProxyType(reached))

    def flops_per_s(self, dtype: str) -> float:
        """Return the rate that large kernels of a dtype reach."""
        return self.flops_of.get(dtype, self.flops_of["float32"])


@lru_cache(maxsize=1)
def _profiles() -> tuple[dict[str, Any], dict[str, Any]]:
    folder = resources.files("autopar.passes.cost") / "profiles"
    devices, links = ((folder / name).read_bytes() for name in ("devices.json", "links.json"))
    return msgspec.json.decode(devices), msgspec.json.decode(links)


def device(name: str) -> Device:
    """Return the device profile called ``name``.

    Raises:
        MeshError: there is none; the message lists those there are.
    """
    devices = _profiles()[0]
    if name not in devices:
        raise MeshError(f"no device profile is called {name!r}; known are {', '.join(sorted(devices))}")
    fields = {key: value for key, value in devices[name].items() if key not in ("description", "source")}
    return Device(name, **fields)


def link(name: str) -> Link:
    """Return the link profile called ``name``.

    Raises:
        MeshError: there is none; the message lists those there are.
    """
    links = _profiles()[1]
    if name not in links:
        raise MeshError(f"no link profile is called {name!r}; known are {', '.join(sorted(links))}")
    return Link(name, links[name]["latency_s"], links[name]["bytes_per_s"])


def mesh_links(mesh: Mesh) -> tuple[Link, ...]:
    """Return the link of each axis: those the mesh names, else inside a node for the last axes that fit into one together.

    Raises:
        MeshError: a name is unknown.
    """
    if mesh.links:
        return tuple(link(name) for name in mesh.links)
    profile = device(mesh.device)
    names = [profile.link_between] * mesh.num_axes
    inside = 1
    for axis in reversed(range(mesh.num_axes)):
        inside *= mesh.sizes[axis]
        if inside > profile.devices_per_node:
            break
        names[axis] = profile.link_inside
    return tuple(link(name) for name in names)
