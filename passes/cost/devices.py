"""Device and link profiles: data with a source for every figure, read from JSON files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from autopar.errors import MeshError
from autopar.mesh import Mesh


@dataclass(frozen=True)
class Link:
    """What carries the messages of one mesh axis.

    Attributes:
        name: as ``Mesh.links`` writes it: a profile's name (``nvlink4``), for one shared by several groups
            ``ethernet_25/8``, and for an axis of which 8 ranks lie in each node ``nvlink4*8+infiniband_400``.
        latency_s: a step from one rank to the next; between nodes for an axis that spans them.
        bytes_per_s: one way between neighbours, of large messages; between nodes it is what one group has for itself.
        call_s: what a collective takes besides its steps and bytes.
        shared: one port carries the messages of all devices of a node.
        meet_s: what ranks that have computed for some time wait for each other, where a collective is waited for.
        few_s: what a sum of a few numbers takes where ranks write them into memory that they share (``FEW_BYTES`` in
            ``collectives.py``); None where it is a call like others.
        inner: the link inside a node, for an axis that spans nodes and has several ranks in each.
        ranks_inside: how many ranks of the axis lie in a node then, else 1.
    """

    name: str
    latency_s: float
    bytes_per_s: float
    call_s: float = 0.0
    shared: bool = False
    inner: Link | None = None
    ranks_inside: int = 1
    meet_s: float = 0.0
    few_s: float | None = None


@dataclass(frozen=True)
class Device:
    """What computes: peak rates by dtype, the share of them that the largest kernels reach, and the memory.

    Attributes:
        peak_flops: dtype name -> floating point operations a second; other dtypes count as float32.
        achievable: the part of the peak that the largest matmuls reach.
        memory_bytes_per_s: bandwidth of the device memory by its data sheet.
        launch_s: overhead of one kernel.
        memory_bytes: capacity.
        devices_per_node: how many share the fast links.
        link_inside, link_between: the default links inside a node and between nodes.
        memory_achievable: the part of the bandwidth that streaming kernels reach.
        num_units: how many tiles of a matmul run at once (streaming multiprocessors).
        fuses: chains of pointwise ops run as one kernel.
        view_s: what a view costs the host, where ops are called one by one.
        draw_s: of one random number.
        shares: kind of op (``KINDS`` in ``compute.py``) -> the part of the achievable rate that it reaches; or an op
            that is bound by memory (``aten.gelu``) -> the part of the bandwidth.
        calls: op -> what it takes besides, where that is not ``launch_s``: some call several kernels.
        stream_curve: ``(bytes moved, bytes a second)`` pairs in ascending order, for devices whose caches make small
            ops faster; between them it is interpolated, and without them the bandwidth is one figure.
        contention: the part of its own time by which a transfer slows the compute that hides it; 1 where transfers
            and compute take turns.
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
    memory_achievable: float = 1.0
    num_units: int = 1
    fuses: bool = False
    view_s: float = 0.0
    draw_s: float = 0.0
    shares: Mapping[str, float] = field(default_factory=dict)
    calls: Mapping[str, float] = field(default_factory=dict)
    stream_curve: tuple[tuple[float, float], ...] = ()
    contention: float = 1.0
    flops_of: Mapping[str, float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        reached = {dtype: peak * self.achievable for dtype, peak in self.peak_flops.items()}
        object.__setattr__(self, "flops_of", MappingProxyType(reached))

    def flops_per_s(self, dtype: str) -> float:
        """Return the rate that the largest kernels of a dtype reach."""
        return self.flops_of.get(dtype, self.flops_of["float32"])

    @property
    def stream_bytes_per_s(self) -> float:
        """The bandwidth that streaming kernels reach."""
        return self.memory_bytes_per_s * self.memory_achievable

    def stream_seconds(self, bytes_moved: Any) -> Any:
        """Return the seconds of moving bytes (a number or an array) through memory, or through the caches."""
        if not self.stream_curve:
            return bytes_moved / self.stream_bytes_per_s
        sizes, rates = np.log(np.array(self.stream_curve)).T
        return bytes_moved / np.exp(np.interp(np.log(np.maximum(bytes_moved, 1.0)), sizes, rates))


_FIGURES = {f.name for f in fields(Device)} - {"name", "flops_of"}
_OPTIONAL = {
    "memory_achievable",
    "num_units",
    "fuses",
    "view_s",
    "draw_s",
    "shares",
    "calls",
    "stream_curve",
    "contention",
}
_REQUIRED = _FIGURES - _OPTIONAL
_LINK_FIGURES = ("latency_s", "bytes_per_s", "call_s", "meet_s", "few_s")


@lru_cache(maxsize=1)
def _profiles() -> tuple[dict[str, Any], dict[str, Any]]:
    folder = resources.files("autopar.passes.cost") / "profiles"
    devices, links = ((folder / name).read_bytes() for name in ("devices.json", "links.json"))
    return msgspec.json.decode(devices), msgspec.json.decode(links)


def known_devices() -> tuple[str, ...]:
    """Return the names of the device profiles."""
    return tuple(sorted(_profiles()[0]))


def known_links() -> tuple[str, ...]:
    """Return the names of the link profiles."""
    return tuple(sorted(_profiles()[1]))


def device(name: str) -> Device:
    """Return the device profile called ``name``, or the one in the file ``name`` (``*.json``).

    Raises:
        MeshError: there is none, or a figure of it is missing or impossible; the message says how to add one.
    """
    if name.endswith(".json"):
        return _device_of(name, _read(name).get("device"))
    devices = _profiles()[0]
    if name not in devices:
        raise MeshError(
            f"no device profile is called {name!r}; known are {', '.join(known_devices())}; to add one, write its "
            "figures into a file as 'autopar calibrate FILE.json' does for the machine it runs on, and name its path"
        )
    return _device_of(name, devices[devices[name].get("alias", name)])


def link(name: str) -> Link:
    """Return the link that ``name`` writes: a profile, ``profile/sharers``, or ``inner*ranks+between``.

    ``path.json:name`` takes the profile from a file that ``autopar calibrate`` wrote.

    Raises:
        MeshError: there is none, or a figure of it is missing or impossible; the message lists those there are.

    >>> link("nvlink4*8+infiniband_400").ranks_inside
    8
    """
    inside, plus, between = name.rpartition("+")
    if plus:
        inner_name, star, ranks = inside.rpartition("*")
        if not star or not ranks.isdecimal() or int(ranks) < 1:
            raise MeshError(f"the link {name!r} is no link; write inner*ranks+between, as nvlink4*8+infiniband_400")
        return _joined(name, link(inner_name), int(ranks), link(between))
    base, slash, sharers = name.rpartition("/")
    if slash and sharers.isdecimal() and int(sharers) > 0:
        whole = link(base)
        return replace(whole, name=name, bytes_per_s=whole.bytes_per_s / int(sharers))
    path, colon, entry = name.rpartition(":")
    if colon and path.endswith(".json"):
        return _link_of(name, _read(path).get("links", {}).get(entry))
    links = _profiles()[1]
    if name not in links:
        raise MeshError(
            f"no link profile is called {name!r}; known are {', '.join(known_links())}; to add one, write its figures "
            "into a file as 'autopar calibrate FILE.json' does under torchrun, and name it FILE.json:<name>"
        )
    return _link_of(name, links[links[name].get("alias", name)])


def _joined(name: str, inner: Link, ranks_inside: int, between: Link) -> Link:
    """Join a link inside nodes and one between them: every rank's own port counts, a shared port once."""
    bytes_per_s = between.bytes_per_s * (1 if between.shared else ranks_inside)
    call_s = max(inner.call_s, between.call_s)
    meet_s = max(inner.meet_s, between.meet_s)
    return Link(name, between.latency_s, bytes_per_s, call_s, between.shared, inner, ranks_inside, meet_s)


def mesh_links(mesh: Mesh) -> tuple[Link, ...]:
    """Return the link of each axis: those the mesh names, else those of its device by ``axis_links``.

    Raises:
        MeshError: a name is unknown.
    """
    if mesh.links:
        return tuple(link(name) for name in mesh.links)
    profile = device(mesh.device)
    names = axis_links(mesh.sizes, profile.devices_per_node, profile.link_inside, profile.link_between)
    return tuple(link(name) for name in names)


def axis_links(sizes: tuple[int, ...], devices_per_node: int, inside: str, between: str) -> tuple[str, ...]:
    """Return the name of the link that each axis of a mesh uses; ranks fill node after node in row-major order.

    Args:
        sizes: of the axes, the slowest first.
        devices_per_node: ranks of one node.
        inside, between: link profiles.

    >>> axis_links((4, 8), 8, "nvlink4", "infiniband_400")
    ('infiniband_400', 'nvlink4')
    >>> axis_links((32,), 8, "nvlink4", "infiniband_400")
    ('nvlink4*8+infiniband_400',)
    """
    in_use = min(devices_per_node, math.prod(sizes))
    out = []
    for axis, size in enumerate(sizes):
        stride = math.prod(sizes[axis + 1 :])
        if stride * size <= devices_per_node:
            out.append(inside)
            continue
        ranks_inside = max(1, devices_per_node // stride)
        sharers = max(1, in_use // ranks_inside)
        name = between if sharers == 1 or not link(between).shared else f"{between}/{sharers}"
        out.append(name if ranks_inside == 1 else f"{inside}*{ranks_inside}+{name}")
    return tuple(out)


def _read(path: str) -> dict[str, Any]:
    """Return the content of a profile file."""
    try:
        content = msgspec.json.decode(Path(path).read_bytes())
    except OSError as error:
        raise MeshError(
            f"the profile {path} can't be read: {error.strerror}; write one with 'autopar calibrate'"
        ) from None
    except msgspec.DecodeError as error:
        raise MeshError(f"the profile {path} is no JSON: {error}; write one with 'autopar calibrate'") from None
    if not isinstance(content, dict):
        raise MeshError(f"the profile {path} must be an object with 'device' and 'links'; got {type(content).__name__}")
    return content


def _device_of(name: str, figures: Any) -> Device:
    if not isinstance(figures, dict):
        raise MeshError(f"the device profile {name!r} must be an object of figures; got {figures!r}")
    missing = sorted(_REQUIRED - set(figures))
    if missing:
        raise MeshError(f"the device profile {name!r} lacks {', '.join(missing)}; add them, with their sources")
    chosen = {key: value for key, value in figures.items() if key in _FIGURES}
    peaks = chosen["peak_flops"]
    if not isinstance(peaks, dict) or "float32" not in peaks:
        raise MeshError(f"peak_flops of the device profile {name!r} must give at least float32; got {peaks!r}")
    for dtype, peak in peaks.items():
        _check(name, f"peak_flops of {dtype}", peak)
    for key in ("memory_bytes_per_s", "memory_bytes", "devices_per_node", "num_units"):
        _check(name, key, chosen.get(key, 1))
    for key in ("achievable", "memory_achievable", "contention"):
        _check(name, key, chosen.get(key, 1.0), most=1.0)
    for key in ("launch_s", "view_s", "draw_s"):
        _check(name, key, chosen.get(key, 0.0), least_open=False)
    _check_tables(name, chosen)
    for key in ("link_inside", "link_between"):
        if not isinstance(chosen[key], str):
            raise MeshError(f"{key} of the device profile {name!r} must name a link profile; got {chosen[key]!r}")
    return Device(name, **chosen)


def _check_tables(name: str, chosen: dict[str, Any]) -> None:
    """Refuse shares, calls and a stream curve that are no tables of positive figures."""
    for key, word in (("shares", "share"), ("calls", "call")):
        figures = chosen.get(key, {})
        if not isinstance(figures, dict):
            raise MeshError(f"{key} of the device profile {name!r} must give a figure a kind of op; got {figures!r}")
        for kind, figure in figures.items():
            _check(name, f"the {word} of {kind}", figure)
    curve = chosen.get("stream_curve", ())
    pairs = isinstance(curve, (list, tuple)) and all(isinstance(row, (list, tuple)) and len(row) == 2 for row in curve)
    if not pairs or [row[0] for row in curve] != sorted({row[0] for row in curve}):
        raise MeshError(
            f"stream_curve of the device profile {name!r} must be pairs of bytes and bytes a second, the bytes "
            f"ascending; got {curve!r}"
        )
    for row in curve:
        for figure in row:
            _check(name, "a figure of stream_curve", figure)
    chosen["stream_curve"] = tuple((float(size), float(rate)) for size, rate in curve)


def _link_of(name: str, figures: Any) -> Link:
    if not isinstance(figures, dict):
        raise MeshError(f"no link profile is called {name!r} there; got {figures!r}")
    missing = [key for key in _LINK_FIGURES[:2] if key not in figures]
    if missing:
        raise MeshError(f"the link profile {name!r} lacks {', '.join(missing)}; add them, with their sources")
    for key in _LINK_FIGURES:
        if key in figures:
            _check(name, key, figures[key], least_open=key == "bytes_per_s")
    return Link(
        name,
        figures["latency_s"],
        figures["bytes_per_s"],
        figures.get("call_s", 0.0),
        bool(figures.get("shared", False)),
        meet_s=figures.get("meet_s", 0.0),
        few_s=figures.get("few_s"),
    )


def _check(name: str, key: str, value: Any, *, least_open: bool = True, most: float = math.inf) -> None:
    """Refuse a figure that is no number, not finite, not positive or above ``most``."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0 or (least_open and value == 0) or value > most:
        bound = f" and at most {most:g}" if math.isfinite(most) else ""
        raise MeshError(f"{key} of the profile {name!r} is {value!r}; it must be a positive finite number{bound}")
