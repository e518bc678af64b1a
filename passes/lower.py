"""Rewrite a program into the programs of ranks: local shapes, collectives, and the passes that improve them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.errors import PlanError
from autopar.mesh import Coordinate
from autopar.placement import parse_layout
from autopar.plans import Plan

from .annotate import annotate
from .improve.improve import improve
from .improve.setting import Setting
from .is_uneven import is_uneven
from .local_program import LocalProgram
from .lower_rank import Lowering
from .program import Program


def lower(
    program: Program,
    plan: Plan,
    coordinate: Coordinate,
    *,
    device: torch.device | None = None,
    run: bool = True,
    improved: bool = True,
) -> LocalProgram:
    """Return what the rank at ``coordinate`` of the plan's mesh runs.

    Every tensor travels exactly the routes of the plan. No op is traced again: local shapes follow from the layouts.

    Args:
        device: where factories (``arange``, ``full``, ...) create their tensors; as captured by default.
        run: the halves will be called as modules, so their code is generated; a simulation needs none.
        improved: run the passes of ``improve``, but those that the plan's options disable; otherwise each arc is
            carried out by itself at its first use.

    Raises:
        PlanError: the plan was made for another program.
        LoweringError: the plan lacks a node, a route or a layout, or names a choice that the op does not have.
    """
    return lower_ranks(program, plan, [coordinate], device=device, run=run, improved=improved)[0]


def lower_ranks(
    program: Program,
    plan: Plan,
    coordinates: Sequence[Coordinate] | None = None,
    *,
    device: torch.device | None = None,
    run: bool = True,
    improved: bool = True,
) -> list[LocalProgram]:
    """Return what several ranks run, all of the mesh by default; see ``lower``."""
    found = program.fingerprint()
    if plan.fingerprint != found:
        raise PlanError(
            f"the plan was made for a program with the fingerprint {plan.fingerprint[:12]}, this one has {found[:12]}; "
            "plan again for this model and these input shapes"
        )
    if any("rule" not in node.meta for node in program.ops()):
        annotate(program)
    coordinates = list(plan.mesh.coordinates()) if coordinates is None else coordinates
    ranks = [Lowering(program, plan, coordinate, device) for coordinate in coordinates]
    joints = [rank.joint() for rank in ranks]
    if improved:
        first = (0,) * plan.mesh.num_axes
        alike = [r.coordinate == first or not is_uneven(j, program, plan.mesh) for r, j in zip(ranks, joints)]
        lead = joints[alike.index(True)] if any(alike) else Lowering(program, plan, first, device).joint()
        others = [joint for joint in joints if joint is not lead]
        improve([lead, *others], _setting(program, plan), plan.options.disable)
    return [rank.local_program(joint, run) for rank, joint in zip(ranks, joints)]


def _setting(program: Program, plan: Plan) -> Setting:
    placeholders = {role.node for role in program.inputs}
    saved = ((name, parse_layout(text)) for name, layouts in plan.saved.items() for text in layouts)
    return Setting(
        mesh=plan.mesh,
        inputs=program.inputs,
        outputs=program.outputs,
        kept=frozenset((name, layout) for name, layout in saved if name in placeholders),
        optimizer=plan.options.optimizer,
        memory_bytes=plan.options.memory,
    )
