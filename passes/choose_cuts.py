"""Choose where stages start on a mesh whose pipeline axis is given: priced regions, placed by the integer program."""

from __future__ import annotations

from autopar.mesh import Mesh
from autopar.plans import Options, PipelineRecord

from .balance_stages import balance_stages
from .cost.devices import device, link, mesh_links
from .find_regions import find_regions
from .price_regions import price_regions
from .program import Program
from .region_variants import Conditions, region_variants
from .schedules import make_schedule
from .solve.stages import place_stages, quick_stages

EXACT_REGIONS = 16
"""Regions up to which the placement is proved; a deeper model takes the fast placement."""

_CHUNKS = {"interleaved_1f1b": 2, "zbv": 2}


def choose_cuts(program: Program, mesh: Mesh, record: PipelineRecord, options: Options) -> tuple[str, ...]:
    """Return the cuts that make the schedule's makespan least; of equal work where there are too few regions.

    Args:
        program: of one micro-batch, annotated.
        mesh: the whole mesh.
        record: its schedule, micro-batches and pipeline axis; without cuts.
        options: what is asked.
    """
    from .pipeline_plan import stage_mesh

    schedule = make_schedule(record.schedule, record.ranks, record.micro_batches, _CHUNKS.get(record.schedule, 1))
    if schedule.num_stages == 1:
        return ()
    inside = stage_mesh(mesh)
    priced = price_regions(program, inside, options)
    if len(priced) < schedule.num_stages:
        return balance_stages(program, schedule.num_stages)
    one = link(device(mesh.device).link_inside)
    stage_link = mesh_links(mesh)[record.axis]
    conditions = Conditions(
        device(mesh.device), 1, one, stage_link, record.micro_batches, options.optimizer, recompute=("",)
    )
    regions = region_variants(priced, conditions)
    found = quick_stages(regions, schedule)
    if len(regions) <= EXACT_REGIONS:
        found = place_stages(regions, schedule, max_rounds=60) or found
    if found is None:
        return balance_stages(program, schedule.num_stages)
    spans = find_regions(program)
    return tuple(spans[first].ops[0] if "#" in spans[first].name else spans[first].name for first in found.firsts[1:])
