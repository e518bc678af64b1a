"""Filling memory: what fits, and what pays only together."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.passes.schedules import make_schedule
from autopar.passes.simulate_schedule import peak_bytes
from autopar.passes.solve.fill_memory import fill_memory
from autopar.passes.solve.stage_records import Region, Variant, stage_costs

KEPT = Variant("kept", 1.0, 2.0, state_bytes=20, saved_bytes=10)
AGAIN = Variant("again", 1.0, 3.0, state_bytes=20, saved_bytes=4)
SHARDED = Variant("sharded", 1.0, 2.1, state_bytes=14, saved_bytes=10, working_bytes=8)


def test_what_needs_more_at_work_is_taken_for_several() -> None:
    """One region that needs 8 at work to keep 6 less saves nothing; three save 10, for less than one computed again."""
    regions = [Region(f"layer{at}", (KEPT, AGAIN, SHARDED)) for at in range(4)]
    schedule = make_schedule("1f1b", 1, 2)
    assert peak_bytes(schedule, stage_costs(regions, (0,), (0,) * 4)) == (120,)
    found = fill_memory(regions, schedule, 110, (0,), (0,) * 4)
    assert found is not None and sorted(found) == [0, 2, 2, 2]
    assert fill_memory(regions, schedule, 120, (0,), (1,) * 4) == (0,) * 4


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_fits_whenever_anything_does(data: st.DataObject) -> None:
    """On one rank with one stage variants are found for any budget that has some, and all of them fit."""
    numbers = st.integers(0, 9)
    kinds = [
        tuple(
            Variant(f"v{at}", data.draw(numbers), data.draw(numbers), 0.0, 0.0, *(data.draw(numbers) for _ in range(3)))
            for at in range(3)
        )
        for _ in range(2)
    ]
    regions = [Region(f"r{at}", kinds[data.draw(st.integers(0, 1))]) for at in range(4)]
    schedule = make_schedule("1f1b", 1, 2)
    budget = data.draw(st.integers(0, 80))

    def used(variants: tuple[int, ...]) -> int:
        return max(peak_bytes(schedule, stage_costs(regions, (0,), variants)))

    begin = tuple(data.draw(st.integers(0, 2)) for _ in regions)
    found = fill_memory(regions, schedule, budget, (0,), begin)
    fitting = [variants for variants in product(range(3), repeat=4) if used(variants) <= budget]
    assert (found is None) == (not fitting)
    assert found is None or used(found) <= budget
