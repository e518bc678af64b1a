"""What a step takes at least bounds every plan, with stages and without."""

from __future__ import annotations

import pytest

import autopar
from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.cost.least_seconds import LeastSeconds
from tests import models


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble", "interleaved_1f1b", "zbv"])
@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_no_schedule_takes_less(schedule: str, device: str) -> None:
    """The bound holds for plans with stages, whatever the schedule."""
    model, args, _ = models.stack(layers=4, width=64, batch=64)
    least = LeastSeconds.of(annotate(capture(model, args)), Mesh((2, 2), device=device))
    chunks = 2 if schedule in ("interleaved_1f1b", "zbv") else 1
    plan = autopar.plan(model, Mesh((2, 2), ("pp", "data"), device), args, micro_batches=4, schedule=schedule)
    assert 0.1 * plan.step_seconds < least.seconds(2, chunks, 4) <= plan.step_seconds


def test_it_falls_with_ranks() -> None:
    """Twice as many ranks take half as long, but for the launches; more micro-batches launch more."""
    model, args, _ = models.stack(layers=2)
    program = annotate(capture(model, args))
    few, many = (LeastSeconds.of(program, Mesh((n, 2), device="h100")) for n in (2, 4))
    assert many.seconds(2, 2, 8) < few.seconds(2, 2, 8)
    assert few.seconds(2, 1, 64) > few.seconds(2, 1, 8)
