"""What a report says of stages, micro-batches and the search that found them."""

from __future__ import annotations

import textwrap

from autopar.plan_records import PipelineRecord, PlanRecord, SearchRecord
from autopar.report.text import WIDTH, format_bytes, format_count, format_seconds, format_share

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "interleaved 1F1B",
    "zero_bubble": "zero bubble",
    "zbv": "zero bubble (V)",
}
"""What people call the schedules."""


def pipeline_lines(plan: PlanRecord) -> list[str]:
    """Return the lines of a report's head on stages, micro-batches and search; none where there are none."""
    lines = [] if plan.pipeline is None else _pipeline(plan.pipeline)
    return lines + ([] if plan.search is None else _search(plan.search))


def _pipeline(record: PipelineRecord) -> list[str]:
    parts = format_count(record.micro_batches, "micro-batch").replace("batchs", "batches")
    if record.ranks == 1:
        return [f"  batch   {parts}, one after the other"]
    name = SCHEDULES.get(record.schedule, record.schedule)
    lines = [f"  stages  {record.num_stages} on {format_count(record.ranks, 'rank')} of {record.name}, {name}, {parts}"]
    return lines + _filled(f"cut before {', '.join(record.cuts)}")


def _search(record: SearchRecord) -> list[str]:
    lines = []
    if record.considered and not record.bound_seconds:
        axes = "axis was" if record.considered == 1 else "axes were"
        lines = [
            f"  search  {record.considered} {axes} considered for stages: {record.pruned} pruned by a bound, "
            f"{record.solved} solved"
        ]
    elif record.chosen:
        gap = 1.0 - record.bound_seconds / record.step_seconds if record.step_seconds else 0.0
        lines = [
            f"  search  {record.considered:,} configurations: {record.pruned:,} pruned by bounds, {record.solved:,} "
            f"solved; at most {100 * gap:.2g} % from the best of all",
            f"          bubble {format_share(record.bubble_share, 1.0)} of the step, fullest rank "
            f"{format_bytes(record.peak_bytes)}",
        ]
    if record.chosen:
        lines += _filled(f"chosen {record.chosen}")
        for text, seconds in record.others:
            lines += _filled(f"before {text}: {format_seconds(seconds)}")
    return lines + (_filled(record.note) if record.note else [])


def _filled(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=" " * 10, subsequent_indent=" " * 12, break_on_hyphens=False, break_long_words=True
    )
