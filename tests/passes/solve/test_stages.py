"""Stage cuts: equal to brute force, within memory, bounds that hold, refusals."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError, OptionError
from autopar.passes.schedules import SCHEDULES, Schedule, make_schedule
from autopar.passes.simulate_schedule import peak_bytes, simulate_schedule
from autopar.passes.solve.branch_stages import branch_stages, relaxed_bound
from autopar.passes.solve.stage_records import Region, Variant, crossing_bytes, stage_costs
from autopar.passes.solve.stages import Placement, place_stages, quick_stages


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Region], Schedule, int | None, list[int]]:
    """Draw a few regions, a schedule, a budget and pinned cuts."""
    name = draw(st.sampled_from(SCHEDULES))
    chunks = 1 if name in ("gpipe", "1f1b") else 2 if name == "zbv" else draw(st.integers(1, 2))
    schedule = make_schedule(name, draw(st.integers(1, 3 if chunks == 1 else 2)), draw(st.integers(1, 4)), chunks)
    seconds, sizes = st.integers(0, 9).map(float), st.integers(0, 9)
    kinds = [
        tuple(
            Variant(
                f"v{v}", draw(seconds), draw(seconds), draw(seconds), draw(seconds), draw(sizes), draw(sizes),
                draw(st.sampled_from([0, 0, 3])),
            )
            for v in range(draw(st.integers(1, 2)))
        )
        for _ in range(2)
    ]  # fmt: skip
    count = draw(st.integers(schedule.num_stages, schedule.num_stages + 2))
    regions = [Region(f"r{at}", draw(st.sampled_from(kinds)), draw(st.sampled_from([0.0, 2.0]))) for at in range(count)]
    budget = draw(st.one_of(st.none(), st.integers(5, 80)))
    pinned = [draw(st.integers(1, count - 1))] if schedule.num_stages > 1 and draw(st.booleans()) else []
    return regions, schedule, budget, pinned


def brute_force(regions: list[Region], schedule: Schedule, budget: int | None, pinned: list[int]) -> float | None:
    """Return the least makespan over all cuts and variants, None when nothing fits."""
    best = None
    for cuts in combinations(range(1, len(regions)), schedule.num_stages - 1):
        if not set(pinned) <= set(cuts):
            continue
        for variants in product(*(range(len(region.variants)) for region in regions)):
            costs = stage_costs(regions, (0, *cuts), variants)
            if budget is None or max(peak_bytes(schedule, costs)) <= budget:
                found = simulate_schedule(schedule, costs).makespan_s
                best = found if best is None else min(best, found)
    return best


@settings(max_examples=60, deadline=None)
@given(problems())
def test_equal_to_brute_force(problem: tuple[list[Region], Schedule, int | None, list[int]]) -> None:
    """The program finds the least makespan of all, or says that nothing fits, and every bound is below it."""
    regions, schedule, budget, pinned = problem
    best = brute_force(regions, schedule, budget, pinned)
    assert best is None or relaxed_bound(regions, schedule, budget) <= best * (1 + 1e-9) + 1e-9
    if best is None:
        with pytest.raises(InfeasibleError) as raised:
            place_stages(regions, schedule, budget, pinned=pinned)
        least = raised.value.least_bytes
        assert least is not None and brute_force(regions, schedule, least, pinned) is not None
        assert brute_force(regions, schedule, least - 1, pinned) is None
        return
    found = place_stages(regions, schedule, budget, pinned=pinned)
    assert isinstance(found, Placement)
    assert found.makespan_s == pytest.approx(best, rel=1e-7, abs=1e-7)
    assert found.gap < 1e-6
    assert budget is None or max(found.simulation.peak_bytes) <= budget
    quick = quick_stages(regions, schedule, budget, pinned=pinned)
    if quick is not None:
        assert quick.bound_s <= best + 1e-9 <= quick.makespan_s + 2e-9
        branched = branch_stages(regions, quick, budget, pinned=pinned, max_programs=60)
        assert branched.bound_s <= best + 1e-9 <= branched.placement.makespan_s + 2e-9
        assert budget is None or max(quick.simulation.peak_bytes) <= budget


def layered(num_layers: int) -> list[Region]:
    """Return an embedding, layers that may be recomputed, and a head that weighs more than a layer."""
    layer = (Variant("kept", 1.0, 1.0, 1.0, 0.0, 100, 40), Variant("again", 1.0, 2.0, 1.0, 0.0, 100, 4, 40))
    return [
        Region("embedding", (Variant("kept", 0.1, 0.1, 0.1, 0.0, 300, 4),), 0.01),
        *(Region(f"layer{at}", layer, 0.01) for at in range(num_layers)),
        Region("head", (Variant("kept", 1.5, 1.5, 1.5, 0.0, 300, 60),)),
    ]


def test_embedding_and_head_are_weighed() -> None:
    """The stage with the head gets fewer layers than the others."""
    found = place_stages(layered(11), make_schedule("1f1b", 4, 16))
    assert found is not None
    sizes = [end - first for first, end in zip(found.firsts, [*found.firsts[1:], 13])]
    assert sizes == [4, 3, 3, 3]
    assert found.gap < 1e-6


def test_less_memory_recomputes_the_first_stages() -> None:
    """1F1B keeps most micro-batches in its first stages: there layers are computed again when memory asks for it."""
    schedule = make_schedule("1f1b", 4, 16)
    found = place_stages(layered(8), schedule, 700)
    assert found is not None and max(found.simulation.peak_bytes) <= 700
    ends = [*found.firsts[1:], 10]
    again = [sum(found.variants[first:end]) for first, end in zip(found.firsts, ends)]
    assert again[0] >= again[1] >= again[2] >= again[3] == 0 < again[0]


def test_deep_models_take_no_longer_rounds() -> None:
    """A placement of 126 layers on 16 stages is found at once, within some percent of its bound."""
    regions = layered(126)
    schedule = make_schedule("1f1b", 16, 64)
    found = quick_stages(regions, schedule)
    assert found is not None
    branched = branch_stages(regions, found, slack=0.005, max_programs=100)
    assert branched.placement.makespan_s <= found.makespan_s
    assert branched.placement.gap <= 0.005


def test_cutoff() -> None:
    """A placement that is no faster than what is already had is None."""
    regions, schedule = layered(6), make_schedule("1f1b", 2, 4)
    best = place_stages(regions, schedule)
    assert best is not None
    assert place_stages(regions, schedule, cutoff_s=best.makespan_s * 0.999) is None


def test_crossing_tensors() -> None:
    """A tensor that skips regions crosses every cut on its way."""
    assert crossing_bytes(4, [(0, 3, 8), (0, 1, 1), (1, 2, 2), (2, 3, 4)]) == (9, 10, 12)


def test_refusals() -> None:
    """More stages than regions, cuts that can't be, and too little memory are said with numbers."""
    with pytest.raises(OptionError, match="8 stages need at least as many regions, but the model has 4"):
        place_stages(layered(2), make_schedule("1f1b", 8, 4))
    with pytest.raises(OptionError, match="no stage can begin at region 9"):
        place_stages(layered(2), make_schedule("1f1b", 2, 4), pinned=[9])
    with pytest.raises(OptionError, match="2 cuts are pinned, which makes more than 2 stages"):
        place_stages(layered(2), make_schedule("1f1b", 2, 4), pinned=[1, 2])
    with pytest.raises(InfeasibleError, match="fits into 10 bytes a rank with 4 micro-batches and 1f1b"):
        place_stages(layered(2), make_schedule("1f1b", 2, 4), 10)
