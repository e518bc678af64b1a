"""Fill in a plan's memory table what only the lowered program shows: temporaries and the highest moment."""

from __future__ import annotations

import msgspec

from autopar.plans import Plan

from .cost.live_bytes import live_bytes
from .lower import lower
from .program import Program


def predict_memory(program: Program, plan: Plan) -> Plan:
    """Return the plan with the bytes that are alive at once on its first rank, which holds the largest pieces.

    The plan is lowered, and the lowered program is walked in the order in which it runs; see ``cost.live_bytes``.

    Raises:
        LoweringError: the plan can't be lowered.
    """
    coordinate = (0,) * plan.mesh.num_axes
    found = live_bytes(lower(program, plan, coordinate, run=False), plan.options.optimizer)
    table = msgspec.structs.replace(
        plan.memory,
        inputs_bytes=found.parts["inputs"] + found.parts["outputs"],
        temporaries_bytes=found.parts["temporaries"],
        gather_bytes=found.largest_gather_bytes,
        peak_bytes=found.peak_bytes,
        peak_at=found.at,
    )
    return msgspec.structs.replace(plan, memory=table)
