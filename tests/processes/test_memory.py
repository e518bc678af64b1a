"""Real gloo processes take the memory that the plan predicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.processes import memory_bodies
from tests.processes.pool import Pool

pytestmark = pytest.mark.processes
Pools = Callable[[int], Pool]

CASES: list[tuple[str, dict[str, Any]]] = [
    ("resnet", {"constraints": {"*": "batch; zero0"}}),
    ("gpt2", {"constraints": {"*": "batch; zero3"}}),
    ("llama", {}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_rank_takes_what_is_predicted(pool: Pools, name: str, options: dict[str, Any]) -> None:
    """The peak within five percent, and what rests to the byte; the plan foresees the fullest rank."""
    results = pool(2).run(memory_bodies.measure_step, name, (2,), options)
    for facts in results:
        assert facts["measured"] == pytest.approx(facts["predicted"], rel=0.05)
        for kind in ("parameters", "optimizer", "buffers", "inputs"):
            assert facts["measured parts"][kind] == facts["predicted parts"][kind], kind
    assert max(facts["predicted"] for facts in results) == results[0]["plan"]
