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
    ("llama", {"again": True}),
    ("mlp", {"micro_batches": 2, "constraints": {"*": "batch; zero3"}}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_rank_takes_what_is_predicted(pool: Pools, name: str, options: dict[str, Any]) -> None:
    """The peak within five percent, and what rests to the byte; the plan foresees the fullest rank.

    With each ZeRO stage, with everything computed again, and in micro-batches.
    """
    again, options = options.get("again", False), {k: v for k, v in options.items() if k != "again"}
    results = pool(2).run(memory_bodies.measure_step, name, (2,), options, again)
    for facts in results:
        assert facts["measured"] == pytest.approx(facts["predicted"], rel=0.05)
        for kind in ("parameters", "optimizer", "inputs"):
            assert facts["measured parts"][kind] == facts["predicted parts"][kind], kind
    if "micro_batches" not in options:
        assert max(facts["predicted"] for facts in results) == results[0]["plan"]
