"""What the processes really move is what the plan lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.processes.counting import (
    count_accumulated,
    count_collectives,
    count_held,
    count_joint,
    count_reductions,
)
from tests.processes.pool import Pool

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("name", "sizes", "how"), [("mlp", (2,), "tight"), ("gpt2", (2, 2), "random"), ("resnet", (2, 2), "random")]
)
def test_what_runs_is_what_the_plan_lists(
    pool: Callable[[int], Pool], name: str, sizes: tuple[int, ...], how: str
) -> None:
    """Every collective of a step, counted on every rank where torch dispatches it; bytes are those of the fullest.

    Several of one kind and axis may run as one over one buffer.
    """
    results = pool(2 if sizes == (2,) else 4).run(count_collectives, name, sizes, how)
    steps = list(zip(*(ran for ran, _ in results), strict=True))
    assert steps and all(len({move[:2] for move in moves}) == 1 for moves in steps)
    ran: Counter[tuple[str, int]] = Counter()
    for moves in steps:
        ran[moves[0][:2]] += max(move[2] for move in moves)
    listed: Counter[tuple[str, int]] = Counter()
    for kind, axis, num_bytes in results[0][1]:
        listed[kind, axis] += num_bytes
    assert ran == listed
    assert len(steps) <= len(results[0][1])


def test_kept_copies_are_gathered_once_a_step(pool: Callable[[int], Pool]) -> None:
    """ZeRO-2: three backwards share one gather of every kept copy; the step makes it stale; gradients are right."""
    results = pool(2).run(count_accumulated, (2,))
    (three, one), each_time, techniques, worst = results[0]
    assert "ZeRO-2" in techniques
    assert three - 3 * each_time == one - each_time > 0
    assert worst < 1e-5


def test_gradients_are_reduced_once_a_step(pool: Callable[[int], Pool]) -> None:
    """ZeRO-0: from the second step on the backwards of a step share one reduction; fewer or more of them stay right."""
    (counts, reductions, worst), *_ = pool(2).run(count_reductions, (2,), (1, 3, 3, 3, 2, 4, 1))
    losses = counts[0] - reductions
    assert losses > 0
    assert counts[1] == 3 * losses + 3 * reductions, "nobody knew that more would follow"
    assert counts[2] == counts[3] == 3 * losses + reductions
    assert counts[4] == 2 * losses + reductions, "the optimizer's step reduced what was left"
    assert counts[5] == 4 * losses + 3 * reductions, "two were expected; the third and fourth came on their own"
    assert worst < 1e-5


@pytest.mark.parametrize("sizes", [(2, 2), (2, 1, 2)])
def test_gradients_are_summed_once_over_two_axes(pool: Callable[[int], Pool], sizes: tuple[int, ...]) -> None:
    """One group has the ranks of both axes; what moves is what moves on each of them in turn; gradients are right."""
    axes = (0, len(sizes) - 1)
    joined = pool(4).run(count_joint, sizes, ())
    apart = pool(4).run(count_joint, sizes, ("join_axes",))
    for (called, moves, worst), (others, same, _) in zip(joined, apart, strict=True):
        assert called and set(called) == {axes}
        assert set(others) == {(axis,) for axis in axes}
        assert moved_bytes(moves) == moved_bytes(same)
        assert worst < 1e-5


def test_gradients_that_wait_are_summed_once_over_two_axes(pool: Callable[[int], Pool]) -> None:
    """From the second step on the backwards of a step share one reduction on the group of both axes."""
    (counts, reductions, worst), *_ = pool(4).run(count_reductions, (2, 2), (1, 3, 3))
    losses = counts[0] - 2 * reductions
    assert losses > 0
    assert counts[1] == 3 * losses + 6 * reductions, "nobody knew that more would follow"
    assert counts[2] == 3 * losses + 2 * reductions
    assert worst < 1e-5


def moved_bytes(moves: list[tuple[str, int, int]]) -> Counter[tuple[str, int]]:
    """Return the bytes of each kind and axis."""
    out: Counter[tuple[str, int]] = Counter()
    for kind, axis, num_bytes in moves:
        out[kind, axis] += num_bytes
    return out


def test_scattered_gradients_wait_inside_no_sync(pool: Callable[[int], Pool]) -> None:
    """ZeRO-1 when asked: one reduction a step, by a backward outside or the optimizer; without it one a backward."""
    steps = {"o": 1, "ooo": 3, "hho": 1, "hhh": 1, "hoo": 2, "ohh": 3, "hho ": 1, "hw": 2}
    (counts, worst), *_ = pool(2).run(count_held, (2,), tuple(letters.strip() for letters in steps))
    assert dict(zip(steps, counts, strict=True)) == steps
    assert worst < 1e-5
