"""Choose where stages start on a mesh whose pipeline axis is given: priced regions, placed by the integer program."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.mesh import Mesh
from autopar.plans import Options, PipelineRecord

from .balance_stages import balance_stages
from .cost.devices import device, link, mesh_links
from .find_regions import find_regions
from .price_regions import PricedRegion, price_regions
from .program import Program
from .region_variants import Conditions, region_variants
from .schedules import Schedule, make_schedule
from .solve.stages import Placement, place_stages, quick_stages

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

    schedule = make_table(record)
    if schedule.num_stages == 1:
        return ()
    inside = stage_mesh(mesh)
    priced = price_regions(program, inside, options, loops=True)
    found = place_regions(priced, schedule, mesh, options.optimizer)
    return name_cuts(program, found) if found else balance_stages(program, schedule.num_stages)


def place_regions(
    priced: Sequence[PricedRegion], schedule: Schedule, mesh: Mesh, optimizer: str, *, exact: bool = True
) -> Placement | None:
    """Return the best placement that is found at once, or proved for few regions; None for fewer regions than stages.

    Args:
        priced: regions on the mesh inside a stage, with what runs once a step told apart.
        schedule: of the stages.
        mesh: the whole mesh, with its pipeline axis.
        optimizer: its name.
        exact: place few regions by the integer program.
    """
    axis = mesh.pipeline_axis
    if axis is None or len(priced) < schedule.num_stages:
        return None
    profile, steps = device(mesh.device), schedule.num_micro_batches
    one, stage_link = link(profile.link_inside), mesh_links(mesh)[axis]
    conditions = Conditions(profile, 1, one, stage_link, steps, optimizer, recompute=("",), update_bytes=0.0)
    regions = region_variants(priced, conditions)
    found = quick_stages(regions, schedule)
    if exact and len(regions) <= EXACT_REGIONS:
        found = place_stages(regions, schedule, max_rounds=60) or found
    return found


def name_cuts(program: Program, found: Placement) -> tuple[str, ...]:
    """Return where the stages of a placement start: at modules, or at ops where a module has several regions."""
    spans = find_regions(program)
    return tuple(spans[first].ops[0] if "#" in spans[first].name else spans[first].name for first in found.firsts[1:])


def make_table(record: PipelineRecord) -> Schedule:
    """Return the table of a record whose cuts are not chosen yet."""
    return make_schedule(record.schedule, record.ranks, record.micro_batches, _CHUNKS.get(record.schedule, 1))
