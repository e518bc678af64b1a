"""Schedules: torch's tables, the closed forms of time and memory, and a simulator that agrees with a plain one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import OptionError
from autopar.passes.schedules import SCHEDULES, Action, Schedule, make_schedule
from autopar.passes.simulate_schedule import (
    StageCost,
    bubble_share,
    in_flight,
    least_makespan,
    peak_bytes,
    simulate_schedule,
)


def chunks_of(name: str, chunks: int) -> int:
    """Return a number of stages a rank that the schedule can have."""
    return 1 if name in ("gpipe", "1f1b") else 2 if name == "zbv" else chunks


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, list[StageCost]]:
    """Draw a schedule with costs of its stages."""
    name = draw(st.sampled_from(SCHEDULES))
    schedule = make_schedule(
        name, draw(st.integers(1, 5)), draw(st.integers(1, 9)), chunks_of(name, draw(st.integers(1, 3)))
    )
    seconds = st.integers(0, 9).map(float)
    costs = [
        StageCost(
            draw(seconds), draw(seconds), draw(seconds), draw(seconds), draw(st.integers(0, 9)), step_s=draw(seconds)
        )
        for _ in range(schedule.num_stages)
    ]
    return schedule, costs


def relaxed_ends(schedule: Schedule, costs: list[StageCost]) -> dict[Action, float]:
    """Return when every action ends: all its waits raised again and again until nothing moves."""
    ends = {action: 0.0 for row in schedule.actions for action in row}
    while True:
        before = dict(ends)
        for row in schedule.actions:
            for at, action in enumerate(row):
                begin = ends[row[at - 1]] if at else 0.0
                other = {"F": action.stage - 1, "W": -1}.get(action.kind, action.stage + 1)
                source = Action(other, action.kind, action.micro_batch)
                if source in ends:
                    same = schedule.rank_of(other) == schedule.rank_of(action.stage)
                    begin = max(begin, ends[source] + (0.0 if same else costs[min(other, action.stage)].send_s))
                ends[action] = begin + costs[action.stage].seconds(action.kind)
        if ends == before:
            return ends


@settings(max_examples=60, deadline=None)
@given(cases())
def test_makespan_is_the_longest_wait(case: tuple[Schedule, list[StageCost]]) -> None:
    """The simulator agrees with waits relaxed to a fixed point, and its path sums up to the makespan."""
    schedule, costs = case
    ends, found = relaxed_ends(schedule, costs), simulate_schedule(schedule, costs)
    finish = max(
        max(ends[action] for action in row) + sum(costs[stage].step_s for stage in schedule.stages_of(rank))
        for rank, row in enumerate(schedule.actions)
    )
    assert found.makespan_s == finish
    assert sum(getattr(costs[stage], f"{term}_s") * count for (stage, term), count in found.path.items()) == finish
    assert least_makespan(schedule, costs) <= finish


@settings(max_examples=40, deadline=None)
@given(cases(), st.data())
def test_a_path_bounds_every_cost(case: tuple[Schedule, list[StageCost]], data: st.DataObject) -> None:
    """The sum along a longest path is a lower bound when the costs are others."""
    schedule, costs = case
    path = simulate_schedule(schedule, costs).path
    others = [StageCost(*(float(data.draw(st.integers(0, 9))) for _ in range(4))) for _ in costs]
    bound = sum(getattr(others[stage], f"{term}_s") * count for (stage, term), count in path.items())
    assert bound <= simulate_schedule(schedule, others).makespan_s


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_stages", [1, 2, 4, 7])
@pytest.mark.parametrize("num_micro_batches", [1, 3, 4, 8, 15])
def test_bubble_closed_form(name: str, num_stages: int, num_micro_batches: int) -> None:
    """With equal stages GPipe and 1F1B wait (K - 1) / (M + K - 1) of the step, also when M < K."""
    schedule = make_schedule(name, num_stages, num_micro_batches)
    found = simulate_schedule(schedule, [StageCost(1.0, 1.5, 0.5)] * num_stages)
    assert found.bubble_share == pytest.approx(bubble_share(num_stages, num_micro_batches))


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_interleaving_divides_the_bubble(chunks: int) -> None:
    """With v stages a rank the time lost is 1/v of it (Narayanan et al. 2021, section 2.2)."""
    schedule = make_schedule("interleaved_1f1b", 4, 8, chunks)
    found = simulate_schedule(schedule, [StageCost(1.0 / chunks, 1.0 / chunks, 1.0 / chunks)] * 4 * chunks)
    assert found.makespan_s - 8 * 3.0 == pytest.approx(3 * 3.0 / chunks)


def test_zero_bubble_closed_form() -> None:
    """ZB-H1 loses (K - 1)(F + I - W) (Qi et al. 2023, table 1)."""
    for forward, inputs, weights in ((1.0, 1.0, 1.0), (2.0, 2.0, 1.5)):
        schedule = make_schedule("zero_bubble", 4, 12)
        found = simulate_schedule(schedule, [StageCost(forward, inputs, weights)] * 4)
        assert found.makespan_s - 12 * (forward + inputs + weights) == pytest.approx(3 * (forward + inputs - weights))


def test_memory_closed_forms() -> None:
    """GPipe keeps M micro-batches, 1F1B at most K - s; recomputation keeps inputs and the work on one micro-batch."""
    stages, micro_batches, layers, layer_bytes, edge_bytes = 4, 8, 6, 100, 7
    whole = [StageCost(1.0, 2.0, saved_bytes=layers * layer_bytes)] * stages
    again = [StageCost(1.0, 3.0, saved_bytes=edge_bytes, working_bytes=layers * layer_bytes)] * stages
    gpipe, one = (make_schedule(name, stages, micro_batches) for name in ("gpipe", "1f1b"))
    assert in_flight(gpipe) == (8, 8, 8, 8)
    assert in_flight(one) == (4, 3, 2, 1)
    assert peak_bytes(gpipe, whole) == (micro_batches * layers * layer_bytes,) * stages
    assert peak_bytes(one, whole) == tuple((stages - s) * layers * layer_bytes for s in range(stages))
    assert peak_bytes(gpipe, again) == (micro_batches * edge_bytes + layers * layer_bytes,) * stages
    assert peak_bytes(one, again) == tuple((stages - s) * edge_bytes + layers * layer_bytes for s in range(stages))


def test_fewer_micro_batches_than_stages() -> None:
    """Every schedule has a table for fewer micro-batches than stages, and the micro-batches in flight are no more."""
    for name in SCHEDULES:
        schedule = make_schedule(name, 4, 2, chunks_of(name, 2))
        assert max(in_flight(schedule)) <= 2
        assert simulate_schedule(schedule, [StageCost(1.0, 1.0, 1.0)] * schedule.num_stages).bubble_share > 0.3


def test_forward_only() -> None:
    """A forward-only table has no backward and takes M + K - 1 forwards."""
    schedule = make_schedule("1f1b", 3, 5, forward_only=True)
    assert {action.kind for row in schedule.actions for action in row} == {"F"}
    assert simulate_schedule(schedule, [StageCost(1.0, 1.0)] * 3).makespan_s == 7.0


def test_stages_of_ranks() -> None:
    """Stages go round the ranks; those of the V schedule go down and up again."""
    assert make_schedule("interleaved_1f1b", 2, 4, 2).stages_of(0) == (0, 2)
    assert make_schedule("zbv", 2, 4, 2).stages_of(0) == (0, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fifo", 2, 2), "no schedule is called 'fifo'; use one of 'gpipe'"),
        (("gpipe", 2, 0), "at least one of its micro-batches; got 0"),
        (("1f1b", 2, 2, 2), "one stage a rank; got 2"),
        (("zbv", 2, 2, 1), "exactly two stages a rank; got 1"),
    ],
)
def test_refusals(arguments: tuple[str, int, int, int], message: str) -> None:
    """Names and numbers that mean nothing are refused."""
    with pytest.raises(OptionError, match=message):
        make_schedule(*arguments)


def test_costs_must_fit() -> None:
    """A simulation needs one cost a stage."""
    with pytest.raises(OptionError, match="3 stages needs as many costs; got 2"):
        simulate_schedule(make_schedule("gpipe", 3, 1), [StageCost(1.0, 1.0)] * 2)
