"""Prices of collectives: they grow with bytes and ranks, and agree with published measurements."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.passes.cost import collectives as c
from autopar.passes.cost.devices import axis_links, device, link

H100 = device("h100")
KINDS = {
    "all_gather": lambda n, size, wire: c.all_gather_seconds(n, size / n, 0, wire, H100),
    "reduce_scatter": lambda n, size, wire: c.reduce_scatter_seconds(n, size, 0, wire, H100),
    "all_reduce": lambda n, size, wire: c.all_reduce_seconds(n, size, wire, H100),
    "all_to_all": lambda n, size, wire: c.all_to_all_seconds(n, size, 0, 0, wire, H100),
    "broadcast": lambda n, size, wire: c.broadcast_seconds(n, size, wire, H100),
    "send": lambda n, size, wire: c.send_seconds(size, wire, H100),
}
CABLES = [("nvlink4", "infiniband_400"), ("nvlink2", "ethernet_25"), ("pcie4", "ethernet_10")]


def wire(ranks, inside, between):
    """Return the link of an axis over nodes of eight."""
    return link(axis_links((ranks,), 8, inside, between)[0])


@pytest.mark.parametrize("kind", KINDS)
@given(
    ranks=st.integers(2, 128),
    sizes=st.tuples(st.floats(1, 1e10), st.floats(1, 1e10)),
    cables=st.sampled_from(CABLES),
)
def test_more_bytes_cost_no_less(kind, ranks, sizes, cables):
    """The price grows with the bytes."""
    small, large = sorted(sizes)
    at = wire(ranks, *cables)
    assert 0 < KINDS[kind](ranks, small, at) <= KINDS[kind](ranks, large, at) < math.inf


@pytest.mark.parametrize("kind", KINDS)
@given(
    ranks=st.tuples(st.integers(2, 256), st.integers(2, 256)),
    size=st.floats(1, 1e10),
    cables=st.sampled_from(CABLES),
)
def test_more_ranks_cost_no_less(kind, ranks, size, cables):
    """The price grows with the ranks when they fill node after node and the tensor stays the same."""
    few, many = sorted(ranks)
    assert KINDS[kind](few, size, wire(few, *cables)) <= KINDS[kind](many, size, wire(many, *cables)) * (1 + 1e-9)


@given(ranks=st.sampled_from([2, 4, 8, 16, 32, 64]), size=st.floats(1, 1e10))
def test_all_reduce_is_no_dearer_than_its_halves(ranks, size):
    """Reducing and gathering in one call never costs more than in two."""
    at = wire(ranks, "nvlink4", "infiniband_400")
    halves = KINDS["reduce_scatter"](ranks, size, at) + KINDS["all_gather"](ranks, size, at)
    assert KINDS["all_reduce"](ranks, size, at) <= halves


def test_an_axis_between_nodes_is_dearer_than_inside():
    """The same collective costs more over the network."""
    for price in KINDS.values():
        assert price(8, 1e8, link("infiniband_400")) > price(8, 1e8, link("nvlink4"))


def test_spanning_axis_uses_every_port():
    """A ring over whole nodes moves bytes faster than one rank a node, and slower than inside a node."""
    spanning = KINDS["all_gather"](32, 1e9, link("nvlink4*8+infiniband_400"))
    assert KINDS["all_gather"](4, 1e9, link("nvlink4")) < spanning < KINDS["all_gather"](4, 1e9, link("infiniband_400"))


def test_copies_for_inner_dims():
    """Gathering along another dim than the first costs a copy of the whole."""
    at = link("nvlink4")
    plain, copied = (c.all_gather_seconds(8, 1e8, dim, at, H100) for dim in (0, 1))
    assert copied - plain == pytest.approx(2 * 8e8 / H100.stream_bytes_per_s + H100.launch_s)


@pytest.mark.parametrize(
    ("kind", "ranks", "size", "name", "microseconds"),
    [
        ("all_reduce", 8, 2**27, "nvlink3", 1162),
        ("all_reduce", 8, 2**33, "nvlink3", 63896),
        ("all_gather", 8, 2**28, "nvlink3", 1192),
        ("all_to_all", 8, 2**33, "nvlink3", 33508),
        ("all_reduce", 8, 4096, "nvlink3", 36),
        ("all_reduce", 8, 2**31, "nvlink4", 9338),
        ("reduce_scatter", 8, 2**31, "nvlink4", 5710),
        ("all_gather", 8, 2**27, "nvlink4", 390),
        ("all_reduce", 8, 2**34, "nvlink5", 35551),
    ],
)
def test_published_times(kind, ranks, size, name, microseconds):
    """Within a third of published times (superbenchmark's logs, OpenXLA's table, stas00/ml-engineering)."""
    assert KINDS[kind](ranks, size, link(name)) == pytest.approx(microseconds * 1e-6, rel=0.34)
