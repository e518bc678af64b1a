"""The property of pipelines: any model, cut anywhere in time and in stages, under any schedule, equals one device."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from autopar.errors import OptionError
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.micro_batches import micro_batches
from autopar.passes.program import check_program
from autopar.passes.rules.micro_batches import MICRO_BATCH
from autopar.plans import PipelineRecord
from autopar.runtime.verify_pipeline import verify_pipeline
from tests.strategies.graphs import Recipe, recipes
from tests.strategies.plans import meshes, plans

TABLES = (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 1), ("zero_bubble", 2), ("zbv", 2))
"""Schedules, and how many stages a rank has under them."""


@pytest.mark.timeout(1800)
@settings(max_examples=settings.default.max_examples // 4)
@given(recipes(4), st.data())
def test_any_pipeline_equals_one_device(recipe: Recipe, data: st.DataObject) -> None:
    """Outputs, every gradient, buffers and stepped parameters equal the eager module's."""
    model, args = recipe.build()
    program = annotate(capture(model, args))
    divisors = [n for n in range(1, recipe.batch + 1) if recipe.batch % n == 0]
    count = data.draw(st.sampled_from(divisors[::-1]), "micro-batches")
    schedule, chunks = data.draw(st.sampled_from(TABLES), "schedule")
    ranks = data.draw(st.integers(1, 3), "ranks")
    outputs = data.draw(st.sampled_from(["auto", "lie"]), "outputs")
    try:
        cut = check_program(micro_batches(program, count, outputs=outputs, staged=ranks > 1))
    except OptionError:
        assert count > 1
        reject()
    ops = [n.name for n in cut.ops() if n.meta["phase"] == "forward" and n.target is not MICRO_BATCH]
    number = ranks * chunks - 1
    if len(ops) <= number:
        reject()
    places = data.draw(st.lists(st.integers(1, len(ops) - 1), min_size=number, max_size=number, unique=True), "cuts")
    plan = data.draw(plans(cut, data.draw(meshes(4))))
    has_gradients = any(role.kind == "tangent" for role in cut.inputs)
    later = {role.index for role in cut.inputs if role.kind == "tangent"} != {cut.loss}
    record = PipelineRecord(
        micro_batches=count,
        ranks=ranks,
        schedule="gpipe" if later and has_gradients and chunks == 1 else schedule,
        cuts=tuple(ops[place] for place in sorted(places)),
    )
    plan = msgspec.structs.replace(
        plan, pipeline=record, options=msgspec.structs.replace(plan.options, outputs=outputs)
    )
    verify_pipeline(model, program, plan, args, optimizer="adamw")
