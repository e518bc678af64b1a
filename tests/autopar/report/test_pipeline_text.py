"""Stages, micro-batches and the search in a plan's head."""

from __future__ import annotations

import msgspec

from autopar.plan_records import PipelineRecord, SearchRecord
from autopar.report.pipeline_text import pipeline_lines
from tests.autopar.fake_plans import small_plan


def test_stages_and_search_are_told() -> None:
    """The head tells the schedule, the cuts, the counts of the search and the next best, within the width."""
    search = SearchRecord(
        chosen="4 stages (1F1B) x 2 data x 1 inside, 16 micro-batches of 1",
        step_seconds=2.0,
        bound_seconds=1.9,
        bubble_share=0.15,
        peak_bytes=4 * 10**9,
        considered=1000,
        pruned=900,
        solved=100,
        others=(("no stages x 8 data x 1 inside, 1 micro-batches of 16", 2.5),),
        note="split without the memory bound " * 8,
    )
    cuts = tuple(f"layers.{at}" for at in (2, 4, 6))
    record = PipelineRecord(micro_batches=16, ranks=4, schedule="1f1b", cuts=cuts)
    lines = pipeline_lines(msgspec.structs.replace(small_plan(), pipeline=record, search=search))
    text = "\n".join(lines)
    assert "stages  4 on 4 ranks of pp, 1F1B, 16 micro-batches" in text
    assert "cut before layers.2, layers.4, layers.6" in text
    assert "1,000 configurations: 900 pruned by bounds, 100 solved; at most 5 % from the best of all" in text
    assert "before no stages x 8 data x 1 inside, 1 micro-batches of 16: 2.5 s" in text
    assert all(len(line) <= 110 for line in lines)


def test_micro_batches_alone_and_nothing() -> None:
    """Without stages only the micro-batches are told; without either nothing is."""
    alone = msgspec.structs.replace(small_plan(), pipeline=PipelineRecord(micro_batches=1))
    assert pipeline_lines(alone) == ["  batch   1 micro-batch, one after the other"]
    assert pipeline_lines(small_plan()) == []
