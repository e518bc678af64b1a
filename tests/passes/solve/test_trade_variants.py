"""Walks from a placement: slower variants go where the longest path does not run."""

from __future__ import annotations

from itertools import product

import pytest

from autopar.passes.schedules import make_schedule
from autopar.passes.simulate_schedule import peak_bytes, simulate_schedule
from autopar.passes.solve.stage_records import Region, Variant, stage_costs
from autopar.passes.solve.stages import Placement
from autopar.passes.solve.trade_variants import trade_variants

LAYER = (Variant("kept", 1.0, 2.0, 0.0, 0.0, 10, 6), Variant("again", 1.0, 3.0, 0.0, 0.0, 10, 1, 1))
SCHEDULE = make_schedule("interleaved_1f1b", 2, 4, 2)


def placed(regions: list[Region], firsts: tuple[int, ...], variants: tuple[int, ...]) -> Placement:
    """Return a placement."""
    costs = stage_costs(regions, firsts, variants)
    return Placement(SCHEDULE, firsts, variants, costs, simulate_schedule(SCHEDULE, costs), 0.0, 0)


@pytest.mark.parametrize("budget", [70, 80, 100, None])
def test_walks_to_the_best_variants(budget: int | None) -> None:
    """From all computed again, the walk comes to the best choice for these cuts; it never leaves memory or cuts."""
    regions, firsts = [Region(f"layer{at}", LAYER) for at in range(8)], (0, 2, 4, 6)
    start = placed(regions, firsts, (1,) * 8)
    found = trade_variants(regions, start, budget, 200)
    choices = [placed(regions, firsts, variants) for variants in product(range(2), repeat=8)]
    best_s = min(one.makespan_s for one in choices if budget is None or max(peak_bytes(SCHEDULE, one.costs)) <= budget)
    assert found.firsts == firsts and found.makespan_s == pytest.approx(best_s)
    assert found.costs == stage_costs(regions, firsts, found.variants)
    assert budget is None or max(found.simulation.peak_bytes) <= budget
    assert trade_variants(regions, start, budget, 0) == start


def test_swaps_where_single_changes_do_not_fit() -> None:
    """Where a rank is full with one region that is sharded, that one moves to where the longest path does not run."""
    layer = (Variant("whole", 1.0, 2.0, 0.0, 0.0, 20, 6), Variant("sharded", 1.0, 3.0, 0.0, 0.0, 10, 6))
    regions, firsts = [Region(f"layer{at}", layer) for at in range(8)], (0, 2, 4, 6)
    choices = [placed(regions, firsts, tuple(int(at == only) for at in range(8))) for only in (0, 1, 4, 5)]
    budget = choices[0].simulation.peak_bytes[0]
    assert placed(regions, firsts, (0,) * 8).simulation.peak_bytes[0] > budget
    assert {one.simulation.peak_bytes for one in choices} == {choices[0].simulation.peak_bytes}
    worst, best = (pick(choices, key=lambda one: one.makespan_s) for pick in (max, min))
    found = trade_variants(regions, worst, budget, 50)
    assert found.makespan_s == pytest.approx(best.makespan_s) and best.makespan_s < worst.makespan_s
    assert max(found.simulation.peak_bytes) <= budget
