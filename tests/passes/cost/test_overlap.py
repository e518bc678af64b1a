"""What a hidden collective costs the compute that hides it."""

from dataclasses import replace

import pytest

from autopar.passes.cost.devices import device, link
from autopar.passes.cost.overlap import MEMORY_PASSES, UNITS_TAKEN, overlap_slowdown

MEASURED = (
    ("nvlink3", "a100-40gb", 0.467),
    ("nvlink2", "v100-16gb", 0.553),
    ("nvlink2_quad", "v100-32gb", 0.314),
    ("pcie4_host", "l4", 0.094),
    ("nvlink2*8+ethernet_100", "v100-16gb", 0.074),
    ("nvlink3*8+ethernet_100", "a100-40gb", 0.052),
)
"""Link, device, and the median of the Mist artifact's overlap profiles: 8 ranks, 4 for the quad."""


@pytest.mark.parametrize(("name", "on", "median"), MEASURED)
def test_slowdown_as_measured(name, on, median):
    """One law serves NVLink and networks of two generations within a tenth of the hidden time."""
    assert overlap_slowdown(link(name), device(on)) == pytest.approx(median, abs=0.11)


def test_slowdown_grows_with_the_link_and_ends_at_all():
    """A faster link takes more of the memory's bandwidth, a faster memory loses less, nothing loses more than all."""
    at, on = link("nvlink3"), device("a100")
    faster = replace(at, bytes_per_s=2 * at.bytes_per_s)
    assert overlap_slowdown(at, on) < overlap_slowdown(faster, on)
    assert overlap_slowdown(at, replace(on, memory_bytes_per_s=2 * on.memory_bytes_per_s)) < overlap_slowdown(at, on)
    assert overlap_slowdown(replace(at, bytes_per_s=1e15), on) == 1.0
    assert overlap_slowdown(replace(at, bytes_per_s=1.0), on) == pytest.approx(UNITS_TAKEN)
    assert MEMORY_PASSES > 0
