"""What an arc costs that runs with others of its kind as one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.passes.cost.collectives import BUCKETED, bucketed_seconds, coalesced_seconds, collective_seconds
from autopar.passes.cost.devices import device, link

H100 = device("h100")
SIZES = st.floats(1.0, 1e10)


@given(
    st.sampled_from([*BUCKETED, "all_to_all"]),
    st.integers(2, 64),
    SIZES,
    SIZES,
    st.sampled_from(["nvlink4", "infiniband_ndr"]),
)
def test_never_above_what_it_costs_alone(kind: str, ranks: int, one: float, other: float, name: str) -> None:
    """Alike or less, growing with the bytes, from a share of one start on; an all-to-all runs alone."""
    less, more = (
        bucketed_seconds(kind, ranks, num_bytes, 0, 0, link(name), H100, others=9) for num_bytes in sorted((one, other))
    )
    alone = collective_seconds(kind, ranks, max(one, other), 0, 0, link(name), H100)
    assert 0 < less <= more <= alone
    if kind == "all_to_all":
        assert more == alone
    else:
        start = collective_seconds(kind, ranks, 0.0, 0, 0, link(name), H100)
        nothing = bucketed_seconds(kind, ranks, 0.0, 0, 0, link(name), H100, others=9)
        assert nothing == pytest.approx(start / 9)


@pytest.mark.parametrize("kind", BUCKETED)
def test_many_small_ones_cost_what_buckets_cost(kind: str) -> None:
    """A thousand gradients of 40 kB: priced alone ten times too dear; as they run, within a fifth."""
    wire, count, num_bytes = link("infiniband_ndr"), 1000, 40_000.0 / (8 if kind == "all_gather" else 1)
    start = collective_seconds(kind, 8, 0.0, 0, 0, wire, H100)
    in_a_bucket = max(
        1, next(n for n in range(1, count) if coalesced_seconds(kind, 8, [num_bytes] * n, wire, H100) >= 2 * start)
    )
    runs = count / in_a_bucket * coalesced_seconds(kind, 8, [num_bytes] * in_a_bucket, wire, H100)
    priced = count * bucketed_seconds(kind, 8, num_bytes, 0, 0, wire, H100, others=count)
    assert priced == pytest.approx(runs, rel=0.25)
    assert count * collective_seconds(kind, 8, num_bytes, 0, 0, wire, H100) > 2 * priced
