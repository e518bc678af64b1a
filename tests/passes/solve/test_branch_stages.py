"""Branch and bound over stage cuts: it closes what the integer program does, and its bounds hold."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import numpy as np
import pytest

from autopar.passes.schedules import Schedule, make_schedule
from autopar.passes.simulate_schedule import longest_paths, peak_bytes, simulate_schedule
from autopar.passes.solve.branch_stages import branch_stages
from autopar.passes.solve.event_program import EventProgram, solves_events
from autopar.passes.solve.path_program import PathProgram
from autopar.passes.solve.stage_model import group_runs
from autopar.passes.solve.stage_records import Region, Variant, stage_costs
from autopar.passes.solve.stages import first_paths, place_stages, quick_stages
from autopar.passes.solve.trade_variants import Choice

SCHEDULES = [("1f1b", 3, 5, 1), ("zero_bubble", 2, 4, 1), ("interleaved_1f1b", 2, 4, 2), ("zbv", 2, 3, 2)]


def layered(num_layers: int) -> list[Region]:
    """Return an embedding, layers that may be computed again, and a head that weighs more than half a layer."""
    layer = (Variant("kept", 1.0, 1.1, 0.9, 0.5, 100, 40), Variant("again", 1.0, 2.1, 0.9, 0.5, 100, 4))
    return [
        Region("embedding", (Variant("kept", 0.1, 0.1, 0.1, 0.0, 300, 4),)),
        *(Region(f"layer{at}", layer) for at in range(num_layers)),
        Region("head", (Variant("kept", 0.6, 0.7, 0.5, 0.1, 300, 60),)),
    ]


@pytest.mark.parametrize("name, ranks, number, chunks", SCHEDULES)
@pytest.mark.parametrize("budget", [None, 1000])
def test_closes_what_the_integer_program_closes(
    name: str, ranks: int, number: int, chunks: int, budget: int | None
) -> None:
    """With programs enough the bound comes within the slack of the optimum, and never above it."""
    regions, schedule = layered(9), make_schedule(name, ranks, number, chunks)
    best = place_stages(regions, schedule, budget)
    start = quick_stages(regions, schedule, budget)
    assert best is not None and start is not None
    branched = branch_stages(regions, start, budget, slack=0.01, max_programs=4000)
    assert branched.bound_s <= best.makespan_s * (1 + 1e-9)
    assert branched.bound_s >= best.makespan_s * 0.985
    assert branched.placement.makespan_s >= best.makespan_s * (1 - 1e-9)


@pytest.mark.parametrize("name, ranks, number, chunks", SCHEDULES)
@pytest.mark.parametrize("budget", [None, 700])
def test_events_prove_their_optimum_by_one_row(
    name: str, ranks: int, number: int, chunks: int, budget: int | None
) -> None:
    """The mean of paths bounds every placement, and as a row it gives the makespan of the events' own answer."""
    regions, schedule = layered(4), make_schedule(name, ranks, number, chunks)
    program = PathProgram(group_runs(regions), schedule, budget)
    assert solves_events(schedule)
    events = EventProgram(program).solve(program)
    assert events is not None
    program.add_path(events.path)
    found = program.solve()
    assert found is not None
    costs = program.relaxed(events.taken, found.bound_s).costs
    assert found.bound_s == pytest.approx(longest_paths(schedule, costs)[0][0], rel=1e-6)
    for cuts in combinations(range(1, len(regions)), schedule.num_stages - 1):
        for variants in product(*(range(len(region.variants)) for region in regions)):
            placed = stage_costs(regions, (0, *cuts), variants)
            makespan_s = simulate_schedule(schedule, placed).makespan_s
            terms = ((count, getattr(placed[stage], f"{term}_s")) for (stage, term), count in events.path.items())
            assert sum(count * seconds for count, seconds in terms) <= makespan_s * (1 + 1e-9)
            if budget is None or max(peak_bytes(schedule, placed)) <= budget:
                assert found.bound_s <= makespan_s * (1 + 1e-9)


def test_columns_left_out_are_slower() -> None:
    """What ``leave_out`` takes from the columns is in no placement that is faster than wanted."""
    regions, schedule = layered(5), make_schedule("1f1b", 3, 5)
    program = PathProgram(group_runs(regions), schedule, 700)
    events = EventProgram(program).solve(program)
    assert events is not None
    program.add_path(events.path)
    assert program.solve() is not None
    most = program.most.copy()
    best = place_stages(regions, schedule, 700)
    assert best is not None
    wanted_s = best.makespan_s * 1.02
    left_s = program.leave_out(wanted_s)
    assert left_s >= wanted_s * (1 - 1e-9) and (program.most < most).any()
    for cuts in combinations(range(1, len(regions)), 2):
        for variants in product(*(range(len(region.variants)) for region in regions)):
            placed = stage_costs(regions, (0, *cuts), variants)
            if max(peak_bytes(schedule, placed)) > 700:
                continue
            firsts = (0, *cuts, len(regions))
            over = False
            for at, limit in enumerate(program.most):
                stage, run, kind = int(program.stage_of[at]), int(program.run_of[at]), int(program.variant_of[at])
                begin = sum(one.count for one in program.runs[:run])
                here = range(max(firsts[stage], begin), min(firsts[stage + 1], begin + program.runs[run].count))
                over |= sum(variants[region] == kind for region in here) > limit
            if over:
                assert simulate_schedule(schedule, placed).makespan_s >= left_s * (1 - 1e-9)


def demanding(num_layers: int) -> list[Region]:
    """Return layers of which one way to run them keeps little but needs much at work; a norm and a head behind them."""
    layer = (
        Variant("kept", 1.0, 1.1, 0.9, 0.5, 100, 40),
        Variant("again", 1.0, 1.4, 0.9, 0.5, 100, 12, 60),
        Variant("sharded", 1.0, 1.4, 1.2, 0.2, 40, 12, 130),
    )
    end, norm = (Variant("kept", 0.6, 0.7, 0.5, 0.1, 60, 20, 30),), (Variant("kept", 0.3, 0.3, 0.1, 0.0, 5, 10),)
    layers = [Region(f"layer{at}", layer) for at in range(num_layers)]
    return [Region("begin", end), *layers, Region("norm", norm), Region("end", end)]


def placements(regions: list[Region], schedule: Schedule, budget: int) -> Iterator[tuple[list[int], Choice, float]]:
    """Yield the stage of every region, its variant, and the makespan, of every placement that fits."""
    for cuts in combinations(range(1, len(regions)), schedule.num_stages - 1):
        stages = [sum(cut <= at for cut in cuts) for at in range(len(regions))]
        for variants in product(*(range(len(region.variants)) for region in regions)):
            placed = stage_costs(regions, (0, *cuts), variants)
            if max(peak_bytes(schedule, placed)) <= budget:
                yield stages, variants, simulate_schedule(schedule, placed).makespan_s


@pytest.mark.parametrize("name, ranks, number, chunks", SCHEDULES)
def test_what_a_placement_needs_at_work_bounds_no_more_than_it(name: str, ranks: int, number: int, chunks: int) -> None:
    """Within limits that a placement is in, the bound is no more than its makespan, and often more than without."""
    regions, schedule, budget = demanding(3), make_schedule(name, ranks, number, chunks), 430
    program = PathProgram(group_runs(regions), schedule, budget)
    for path in first_paths(schedule):
        program.add_path(path)
    free = program.solve()
    assert free is not None
    found = list(placements(regions, schedule, budget))
    raised = 0
    for stages, variants, makespan_s in found:
        taken = np.zeros(len(program.columns))
        for at, (stage, variant) in enumerate(zip(stages, variants, strict=True)):
            run = (at > 0) + max(0, at - len(regions) + 3)
            taken[(program.stage_of == stage) & (program.run_of == run) & (program.variant_of == variant)] += 1
        assert taken.sum() == len(regions)
        counts = program.counts(taken)
        needs = {
            group: (float(counts[group] >= 1), float(len(regions) * (counts[group] >= 1))) for group in program.needs
        }
        layers = {group: (counts[group], counts[group]) for group in range(program.levels[1], program.levels[2])}
        assert program.overfull(taken) == set()
        for limits in ({}, needs, layers, {**needs, **layers}):
            program.restrict(limits)
            bounded = program.solve()
            assert bounded is not None and bounded.bound_s <= makespan_s * (1 + 1e-9)
        raised += bounded.bound_s > free.bound_s * (1 + 1e-6)
    assert found and raised
    program.restrict({})
    again = program.solve()
    assert again is not None and again.bound_s == pytest.approx(free.bound_s)


def test_stages_in_order() -> None:
    """Where a stage has a layer, what follows layers is on no stage before it, what precedes them on none behind."""
    regions, schedule = [Region("first", (Variant("kept", 0.1, 0.1),)), *demanding(5)], make_schedule("1f1b", 3, 5)
    program = PathProgram(group_runs(regions), schedule, None)
    layers = {int(program.stage_of[np.argmax(program.groups[at])]): at for at in range(*program.levels[1:3])}
    begin, norm = program.run_of == 1, program.run_of == 3
    assert program.most[begin & (program.stage_of == 1)].all() and program.most[norm & (program.stage_of == 1)].all()
    program.restrict({layers[2]: (1.0, 5.0)})
    assert not program.most[norm & (program.stage_of == 1)].any() and program.most[norm & (program.stage_of == 2)].all()
    assert program.most[begin].all()
    program.restrict({layers[0]: (1.0, 5.0)})
    assert not program.most[begin & (program.stage_of == 1)].any()
    assert program.most[begin & (program.stage_of == 0)].all() and program.most[norm].all()
    program.restrict({})
    assert (program.most == program.whole).all()


def test_needs_at_work_close_what_fractions_leave_open() -> None:
    """Where variants that keep less need more at work, the bound reaches the optimum, and no placement beats it."""
    regions, schedule, budget = demanding(5), make_schedule("interleaved_1f1b", 2, 4, 2), 620
    best_s = min(makespan_s for _, _, makespan_s in placements(regions, schedule, budget))
    start = quick_stages(regions, schedule, budget)
    assert start is not None
    branched = branch_stages(regions, start, budget, slack=0.005, max_programs=2000)
    assert branched.bound_s <= best_s * (1 + 1e-9) <= branched.placement.makespan_s * (1 + 2e-9)
    assert branched.bound_s >= best_s * 0.99
