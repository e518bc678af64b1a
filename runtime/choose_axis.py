"""Plan on a mesh whose pipeline axis nobody names: without stages, or along the axis for which that is best."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from autopar.errors import AutoparError, InfeasibleError, MeshError
from autopar.mesh import PIPELINE_AXIS, Mesh
from autopar.passes.program import Program
from autopar.plans import Options, Plan, SearchRecord
from autopar.runtime.fit_staged_memory import fit_staged_memory

if TYPE_CHECKING:
    from autopar.passes.search_axes import AxisSearch, Trial

MOST_PLANS = 4
"""Axes that are planned at most, the most promising first."""


def is_open(mesh: Mesh, options: Options) -> bool:
    """Tell whether any axis of a mesh may become the pipeline axis."""
    return mesh.pipeline is None and mesh.pipeline_axis is None and mesh.num_ranks > 1 and not options.pinned


def choose_axis(program: Program, mesh: Mesh, options: Options) -> Plan:
    """Return the plan of a program on a mesh, with stages along one of its axes where that is best.

    An axis becomes the pipeline axis when its step, by the simulated schedule, is shorter than without stages by more
    than ``MARGIN``, when nothing fits the memory otherwise, or when a schedule or cuts are asked for. ``search`` tells
    what was tried, or why nothing was.

    Args:
        program: of the whole batch.
        mesh: the whole mesh; an axis that it names as its pipeline axis is that.
        options: what is asked.

    Raises:
        MeshError: a schedule or cuts are asked for, but no axis can have stages.
        InfeasibleError: nothing fits the memory, with or without stages.
        OptionError: as ``plan_program``.
    """
    from autopar.passes.search_axes import MARGIN, AxisSearch, refuse_stages  # who only runs a plan needs no solver

    if not is_open(mesh, options):
        return fit_staged_memory(program, mesh, options)
    asked = bool(options.schedule or options.cuts)
    flat, error = (None, None) if asked else _without_stages(program, mesh, options)
    refused = refuse_stages(program, options, needed=error is not None)
    limit_s = float("inf") if flat is None else flat.cost.step_seconds * (1.0 - MARGIN)
    search = AxisSearch(program, mesh, options, limit_s)
    trials = [] if refused else search.trials()
    found = _best(program, options, search, trials)
    if found is not None:
        return _with_record(found, search, flat, options)
    reasons = "; ".join(filter(None, [refused, *search.reasons]))
    if flat is None:
        raise error or MeshError(
            f"stages are asked for (schedule={options.schedule!r}, cuts={options.cuts}), but no axis of {mesh} is "
            f"called {PIPELINE_AXIS!r}, and none can be the pipeline axis: {reasons}; ask for others, or for none"
        )
    seconds = f"; the best would take {trials[0].step_s:.4g} s" if trials else ""
    note = (
        f"no stages: {reasons}"
        if reasons
        else f"no stages: none saves more than {100 * MARGIN:.0f} % of the step{seconds}"
    )
    return msgspec.structs.replace(flat, search=_record(search, note=note))


def _without_stages(program: Program, mesh: Mesh, options: Options) -> tuple[Plan | None, InfeasibleError | None]:
    try:
        return fit_staged_memory(program, mesh, options), None
    except InfeasibleError as error:
        return None, error


def _best(program: Program, options: Options, search: AxisSearch, trials: list[Trial]) -> Plan | None:
    """Return the fastest plan of the trials that is faster than the limit and fits the memory."""
    best, limit_s = None, search.limit_s
    for trial in trials[:MOST_PLANS]:
        if trial.step_s >= limit_s:
            break
        try:
            plan = fit_staged_memory(program, trial.mesh, trial.ask(options))
        except AutoparError as error:
            search.reasons.append(f"{trial.mesh.pipeline}: {error}")
            continue
        if plan.cost.step_seconds < limit_s:
            best, limit_s = plan, plan.cost.step_seconds
    return best


def _with_record(plan: Plan, search: AxisSearch, flat: Plan | None, options: Options) -> Plan:
    record = plan.pipeline
    assert record is not None
    chosen = f"{record.name} as the pipeline axis"
    others = () if flat is None else (("no stages", flat.cost.step_seconds),)
    found = _record(search, chosen, plan.cost.step_seconds, plan.memory.total_bytes, others)
    share = plan.cost.communication_seconds / plan.cost.step_seconds
    asked = msgspec.structs.replace(options, overlap=plan.options.overlap)
    return msgspec.structs.replace(plan, options=asked, search=msgspec.structs.replace(found, bubble_share=share))


def _record(
    search: AxisSearch,
    chosen: str = "",
    step_s: float = 0.0,
    peak_bytes: int = 0,
    others: tuple[tuple[str, float], ...] = (),
    *,
    note: str = "",
) -> SearchRecord:
    return SearchRecord(
        chosen=chosen,
        step_seconds=step_s,
        peak_bytes=peak_bytes,
        considered=search.considered,
        pruned=search.pruned,
        solved=search.solved,
        others=others,
        note=" ".join(note.split())[:4000],
    )
