"""Fault cases on real processes, a sample that changes with the date; all of them in the deep profile."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.fault_cases import load_cases
from tests.processes.fault_bodies import FILE, run_fault_case
from tests.processes.pool import Pool
from tests.rotate import todays

pytestmark = pytest.mark.processes
CASES = [(name, sizes) for name in sorted(load_cases(FILE).REG) for sizes in ((2,), (2, 2))]


@pytest.mark.parametrize(("name", "sizes"), todays(CASES, lambda case: case[1], more=3))
def test_processes_equal_one_device(pool: Callable[[int], Pool], name: str, sizes: tuple[int, ...]) -> None:
    """By autopar's own plan: equal, or refused where the case allows it, on every rank alike."""
    results = pool(2 if sizes == (2,) else 4).run(run_fault_case, name, sizes)
    assert {result for result, _ in results} <= {"match", "refused_allowed"}, results[0]
    assert len({result for result, _ in results}) == 1
