"""Plan stages within a budget: what a rank keeps depends on the schedule, which the split alone does not know."""

from __future__ import annotations

import msgspec

from autopar.errors import InfeasibleError
from autopar.mesh import Mesh
from autopar.passes.pipeline_plan import plan_program
from autopar.passes.program import Program
from autopar.plans import Options, Plan
from autopar.runtime.pipeline_memory import predict_staged_memory

ROUNDS = 4
"""How often a smaller budget of the split is tried."""


def fit_staged_memory(program: Program, mesh: Mesh, options: Options) -> Plan:
    """Return the plan of a program, with the memory of the fullest rank; with stages that is within ``memory``.

    The split counts what all stages together keep of one micro-batch. What a rank keeps of those in flight is known
    when the plan is cut and its schedule walked. Where that is too much, the split gets less, until it fits.

    Args:
        program: of the whole batch.
        mesh: the whole mesh.
        options: what is asked.

    Raises:
        InfeasibleError: no plan was found that fits; it names a budget that has one.
        MeshError, OptionError: as ``plan_program``.
    """
    budget, axis = options.memory, mesh.pipeline_axis
    ranks = 1 if axis is None else mesh.sizes[axis]
    if budget is None or ranks == 1:
        return predict_staged_memory(program, plan_program(program, mesh, options))
    given, least = budget, None
    for _ in range(ROUNDS):
        plan, smallest = _plan(program, mesh, msgspec.structs.replace(options, memory=given), ranks)
        found = predict_staged_memory(program, plan)
        if least is None or found.memory.total_bytes < least.memory.total_bytes:
            least = found
        if smallest or found.memory.total_bytes <= budget:
            break
        given = min(given, plan.memory.total_bytes // ranks) * budget // found.memory.total_bytes
    assert least is not None and least.pipeline is not None
    record, need = least.pipeline, least.memory.total_bytes
    if need <= budget:
        return msgspec.structs.replace(least, options=msgspec.structs.replace(least.options, memory=budget))
    raise InfeasibleError(
        f"no plan was found that keeps at most {budget} bytes a rank with {record.ranks} stages and "
        f"{record.micro_batches} micro-batches of {record.schedule}; with {need} there is one: raise memory= to that, "
        "or use more ranks, smaller micro-batches, or a schedule that keeps fewer of them",
        need,
    )


def _plan(program: Program, mesh: Mesh, options: Options, ranks: int) -> tuple[Plan, bool]:
    """Return the plan within the split's budget, or that of the least memory there is; tell whether it is that."""
    try:
        return plan_program(program, mesh, options), False
    except InfeasibleError as error:
        if error.least_bytes is None:
            raise
        # the split counted all stages together
        least = msgspec.structs.replace(options, memory=-(-error.least_bytes // ranks))
        return plan_program(program, mesh, least), True
