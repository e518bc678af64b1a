"""Price the stages of a decision: seconds of each, and of the schedule that runs them."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.mesh import Mesh
from autopar.plans import Cost

from .assign_stages import assign_stages
from .cost.collectives import send_seconds
from .cost.devices import Device, Link, device, mesh_links
from .find_regions import Span
from .micro_batches import completes
from .price_regions import Part, Pricing, Work
from .program import Program
from .schedules import Schedule
from .simulate_schedule import StageCost, simulate_schedule
from .solve.decide import Decided

ADDED = 3.0
"""How often a gradient's bytes move when a micro-batch's part is added to the sum: two are read, one is written."""


def price_stages(program: Program, decided: Decided, cuts: Sequence[str], schedule: Schedule, mesh: Mesh) -> Cost:
    """Return the seconds of a step of stages: the schedule's makespan, and what its busiest rank does in it.

    What is left of the step counts as communication: waiting for other stages.

    Args:
        program: of one micro-batch.
        decided: for a step of all micro-batches, on the mesh inside a stage.
        cuts: where each stage but the first starts.
        schedule: of the stages.
        mesh: the whole mesh, with its pipeline axis.
    """
    axis = mesh.pipeline_axis
    assert axis is not None
    pricing = Pricing(program, decided, spans_of(program, cuts), loops=True)
    profile, link = device(mesh.device), mesh_links(mesh)[axis]
    added = _added_seconds(pricing, profile)
    costs = [_stage_cost(*parts, profile, link) for parts in zip(pricing.works(), added, pricing.sends(), strict=True)]
    simulation = simulate_schedule(schedule, costs)
    step, busy = simulation.makespan_s, max(simulation.busy_s)
    return Cost(step_seconds=step, compute_seconds=busy, communication_seconds=step - busy)


def spans_of(program: Program, cuts: Sequence[str]) -> tuple[Span, ...]:
    """Return the forward ops of every stage."""
    stages = assign_stages(program, cuts)
    ops: list[list[str]] = [[] for _ in range(len(cuts) + 1)]
    for node in program.ops():
        if node.meta["phase"] == "forward":
            ops[stages[node.name]].append(node.name)
    return tuple(Span(f"stage {index}", tuple(names)) for index, names in enumerate(ops))


def _stage_cost(work: dict[Part, Work], added_s: float, num_bytes: int, profile: Device, link: Link) -> StageCost:
    return StageCost(
        forward_s=work["forward"].seconds,
        input_s=work["input"].seconds,
        weight_s=work["weight"].seconds + added_s,
        send_s=float(send_seconds(float(num_bytes), link, profile)) if num_bytes else 0.0,
        step_s=work["once"].seconds,
    )


def _added_seconds(pricing: Pricing, profile: Device) -> list[float]:
    """Return what each stage takes to add up the gradients of a micro-batch, of several."""
    out = [0.0] * len(pricing.spans)
    for node in pricing.program.ops() if pricing.count > 1 else ():
        if completes(node) and node.meta["phase"] == "backward":
            out[pricing.at[node.name]] += float(profile.stream_seconds(ADDED * pricing.local_bytes(node.name)))
    return out
