"""Which link the ranks of a published run talk over, by what the row says of its nodes and its network."""

from __future__ import annotations

import dataclasses

from autopar.passes.cost.devices import Link, axis_links, device, link
from benchmarks.published_runs import Run

RACKS = ("gb200", "gb300")
"""Devices whose fast links join several hosts."""

CUBE_MESH = {"nvlink2": ((2, "nvlink2_pair"), (4, "nvlink2_quad"))}
"""Links inside a node without a switch -> those that few ranks have among themselves."""


def node_size(run: Run) -> int:
    """Return how many devices share the fast links; more than a host holds where a rack does."""
    return max(run.devices_per_node, device(run.device).devices_per_node if run.device in RACKS else 0)


def inside_link(run: Run, ranks: int) -> str:
    """Return the link inside a node between so many ranks: without a switch, few have a part of the cables."""
    name = device(run.device).link_inside
    if not run.switched:
        for most, found in CUBE_MESH.get(name, ()):
            if ranks <= most:
                return found
    return name


def network(run: Run) -> str:
    """Return the link between nodes: that nearest to the speed that the run states, else the device's usual one."""
    gigabits = run.network_bits_per_s / 1e9
    if not gigabits:
        return device(run.device).link_between
    if gigabits <= 100:
        return "infiniband_100_shared" if gigabits > 50 else "ethernet_50" if gigabits > 25 else "ethernet_25"
    port = gigabits / node_size(run)
    return f"infiniband_{max([100, *(speed for speed in (200, 400, 800) if speed <= 1.5 * port)])}"


def one_ring(at: Link, ranks: int) -> Link:
    """Return a link over nodes as a single ring sees it: the slowest hop sets the pace, and every hop is a step."""
    if at.inner is None:
        return at
    nodes = -(-ranks // at.ranks_inside)
    steps_s = (ranks - nodes) * at.inner.latency_s + nodes * at.latency_s
    pace = min(at.bytes_per_s, at.inner.bytes_per_s)
    return dataclasses.replace(at, latency_s=steps_s / ranks, bytes_per_s=pace, inner=None, ranks_inside=1)


def tensor_link(run: Run) -> str:
    """Return the name of the link of the tensor-parallel axis."""
    return axis_links((run.tp,), node_size(run), inside_link(run, run.tp), network(run))[0]


def data_link(run: Run) -> Link:
    """Return the link of the data axis: stages lie farthest apart, ranks of a tensor-parallel group side by side.

    Where parameters are split over part of the axis, it is that part's.
    """
    ranks, per_node = run.shards, node_size(run)
    found = link(axis_links((ranks, run.tp), per_node, inside_link(run, ranks), network(run))[0])
    if run.early_gathers and found.inner is not None:
        return dataclasses.replace(found, bytes_per_s=found.bytes_per_s / found.ranks_inside)
    if run.network_bits_per_s > 100e9 and ranks * run.tp > per_node:
        port = run.network_bits_per_s / 8 * 0.92 / per_node
        found = dataclasses.replace(found, bytes_per_s=port * found.ranks_inside, shared=False)
    return one_ring(found, ranks)
