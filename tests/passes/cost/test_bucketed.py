"""What an arc costs that runs with others of its kind as one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.passes.cost.collectives import (
    BUCKETED,
    FEW_BYTES,
    Company,
    bucketed_seconds,
    coalesced_seconds,
    collective_seconds,
)
from autopar.passes.cost.devices import device, link
from autopar.runtime.board import WORDS

H100 = device("h100")
SIZES = st.floats(1.0, 1e10)


@given(
    st.sampled_from([*BUCKETED, "all_to_all"]),
    st.integers(2, 64),
    SIZES,
    SIZES,
    st.sampled_from(["nvlink4", "infiniband_ndr"]),
    st.sampled_from([0.0, 1e-4, 0.1, 1.0]),
)
def test_never_above_what_it_costs_alone(
    kind: str, ranks: int, one: float, other: float, name: str, share: float
) -> None:
    """Alike or less, growing with the bytes, from a share of one start on; an all-to-all runs alone."""
    less, more = (
        bucketed_seconds(kind, ranks, num_bytes, 0, 0, link(name), H100, company=Company(9))
        for num_bytes in sorted((one, other))
    )
    alone = collective_seconds(kind, ranks, max(one, other), 0, 0, link(name), H100)
    assert 0 < less <= more <= alone
    if kind == "all_to_all":
        assert more == alone
    else:
        start = collective_seconds(kind, ranks, 0.0, 0, 0, link(name), H100)
        nothing = bucketed_seconds(kind, ranks, 0.0, 0, 0, link(name), H100, company=Company(9))
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
    priced = count * bucketed_seconds(kind, 8, num_bytes, 0, 0, wire, H100, company=Company(count))
    assert priced == pytest.approx(runs, rel=0.25)
    assert count * collective_seconds(kind, 8, num_bytes, 0, 0, wire, H100) > 2 * priced


@pytest.mark.parametrize("contention", [0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("count", [60, 2000])
def test_what_nobody_waits_for_costs_what_even_buckets_cost(count: int, contention: float) -> None:
    """Gradients of 60 kB: their bytes, and the starts of as many buckets as there are."""
    wire, num_bytes = link("ethernet_25"), 60_000.0
    slow = replace(H100, contention=contention)
    start, whole = (
        float(collective_seconds("all_reduce", 8, size, 0, 0, wire, slow)) for size in (0.0, count * num_bytes)
    )
    buckets = max(1.0, math.sqrt((1.0 - contention) * (whole - start) / (contention * start)))
    runs = sum([(whole - start) / buckets + start] * math.ceil(buckets)) * buckets / math.ceil(buckets)
    company = Company(count, 1.0 / count)
    priced = count * bucketed_seconds("all_reduce", 8, num_bytes, 0, 0, wire, slow, company=company)
    assert priced == pytest.approx(runs, rel=0.05)


@pytest.mark.parametrize("kind", BUCKETED)
def test_only_who_waits_pays_for_ranks_that_come_apart(kind: str) -> None:
    even, uneven = link("ethernet_25"), replace(link("ethernet_25"), meet_s=0.5)
    waited = [collective_seconds(kind, 8, 1e4, 0, 0, wire, H100) for wire in (even, uneven)]
    assert waited[1] == pytest.approx(waited[0] + 0.5)
    for company in (Company(100), Company(100, 0.01)):
        if kind == "all_gather" and company.share:
            continue  # among sums it goes alone
        shared = [bucketed_seconds(kind, 8, 1e4, 0, 0, wire, H100, company=company) for wire in (even, uneven)]
        assert shared[1] == pytest.approx(shared[0])
    assert coalesced_seconds(kind, 8, [1e4, 2e4], uneven, H100) == coalesced_seconds(kind, 8, [1e4, 2e4], even, H100)


def test_a_gather_among_sums_finds_no_company() -> None:
    wire = link("ethernet_25")
    alone = collective_seconds("all_gather", 8, 1e4, 0, 0, wire, H100)
    assert bucketed_seconds("all_gather", 8, 1e4, 0, 0, wire, H100, company=Company(100, 0.01)) == alone
    assert bucketed_seconds("all_gather", 8, 1e4, 0, 0, wire, H100, company=Company(100)) < alone


def test_sums_of_a_few_numbers_go_through_shared_memory() -> None:
    """They alone, and never at a higher price than the call."""
    slow = link("ethernet_25")
    for few_s in (1e-6, 1.0):
        wire = replace(slow, few_s=few_s)
        for kind in BUCKETED:
            for num_bytes in (4.0, FEW_BYTES, FEW_BYTES + 1):
                priced, call = (float(collective_seconds(kind, 8, num_bytes, 0, 0, w, H100)) for w in (wire, slow))
                few = kind == "all_reduce" and num_bytes <= FEW_BYTES
                assert priced == (min(few_s, call) if few else call)
        company = Company(100, 0.01)
        shared = [bucketed_seconds("all_reduce", 8, 1e4, 0, 0, w, H100, company=company) for w in (wire, slow)]
        assert shared[0] == shared[1]
    assert WORDS * torch.float32.itemsize == FEW_BYTES
