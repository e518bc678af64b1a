"""Compare a step in micro-batches and stages, all ranks of it in one process, with the original module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.errors import MismatchError, PlanError
from autopar.passes.pipeline_plan import cut_program, schedule_of, stage_pieces
from autopar.passes.program import Program
from autopar.plans import Plan

from .micro_batch_norms import with_micro_batch_norms
from .simulate import StepResult
from .simulate_pipeline import simulate_pipeline
from .verify_ranks import Reference, differences, run_original, step_differences

_SEED = 20


def verify_pipeline(
    model: nn.Module,
    program: Program,
    plan: Plan,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    rtol: float | None = None,
    optimizer: str | None = None,
    seed: int = _SEED,
) -> StepResult:
    """Run every rank of every stage of ``plan`` by its schedule and compare with ``model``; return what they computed.

    Compared is what ``verify_ranks`` compares. Outputs that the plan leaves out are not. Batch norms that the plan lets
    take the statistics of each micro-batch do so in ``model`` too.

    Args:
        program: of the whole batch.
        plan: with a ``pipeline``.
        args, kwargs: the global batch.
        rtol, optimizer: as for ``verify_ranks``.

    Raises:
        MismatchError: something differs.
        PlanError: the plan was made for another model or other input shapes.
        InputError: the model has no values (it is on meta).
    """
    record = plan.pipeline
    if record is None:
        raise PlanError("the plan has neither micro-batches nor stages; verify it as it is")
    state = torch.random.get_rng_state()
    try:
        cut = cut_program(program, record, plan.options.outputs)
        pairs = [stage_pieces(cut, plan, coordinate, run=False) for coordinate in plan.mesh.coordinates()]
        programs, staged = [local for local, _ in pairs], [pieces for _, pieces in pairs]
        if record.norms:
            model = with_micro_batch_norms(model, record.norms, record.micro_batches)
        reference = _kept(run_original(model, program, args, kwargs or {}, seed), cut)
        has_backward = any(role.kind == "tangent" for role in cut.inputs)
        later = {role.index for role in cut.inputs if role.kind == "tangent"} != {cut.loss}
        torch.manual_seed(seed)
        schedule = schedule_of(record, forward_only=not has_backward)
        result = simulate_pipeline(programs, staged, schedule, reference.values, later=later)
        faults = differences(cut, result, reference, rtol)
        if not faults:
            step = optimizer or plan.options.optimizer
            faults = step_differences(cut, programs, result, reference, str(step), rtol)
    finally:
        torch.random.set_rng_state(state)
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise MismatchError(
            f"the plan does not compute what one device computes: {faults[0]}{more}. It has {record.micro_batches} "
            f"micro-batches and {record.num_stages} stages under the schedule {record.schedule}; verify a plan of the "
            "same splits with micro_batches=1 and without the axis pp to see whether a split or the cutting is to blame"
        )
    return result


def _kept(reference: Reference, cut: Program) -> Reference:
    """Return the reference without the outputs that the cut program leaves out."""
    out = {role.index for role in cut.outputs if role.kind == "output" and role.node is None}
    leaves = [None if i in out and isinstance(leaf, torch.Tensor) else leaf for i, leaf in enumerate(reference.leaves)]
    return replace(reference, leaves=leaves)
