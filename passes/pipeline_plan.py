"""Plan a step in micro-batches and stages, and make what each rank runs of the plan."""

from __future__ import annotations

from functools import partial

import msgspec
from torch import fx

from autopar.errors import InfeasibleError, MeshError, OptionError, PlanError
from autopar.mesh import PIPELINE_AXIS, Coordinate, Mesh
from autopar.placement import parse_layout
from autopar.plans import Options, PipelineRecord, Plan

from .assign_stages import assign_stages
from .cost.devices import mesh_links
from .cut_stages import cut_stages
from .improve.improve_stages import improve_stages
from .is_uneven import is_uneven
from .local_program import LocalProgram
from .lower import lower
from .micro_batch_choices import batch_size
from .micro_batches import micro_batches
from .program import Program
from .save_at_cuts import save_at_cuts
from .schedules import SPLITS_BACKWARD, Schedule, make_schedule
from .stage_pieces import StagedProgram

_PER_STAGE = 4
"""Micro-batches for each stage when nobody says how many: the bubble is then below a fifth."""


def stage_mesh(mesh: Mesh) -> Mesh:
    """Return the mesh of one stage: all axes but the pipeline axis, with their links; one rank where there are none."""
    axis = mesh.pipeline_axis
    if axis is None:
        return mesh
    kept = [i for i in range(mesh.num_axes) if i != axis]
    if not kept:
        return Mesh((1,), ("rank",), mesh.device)
    sizes, names = tuple(mesh.sizes[i] for i in kept), tuple(mesh.names[i] for i in kept)
    inner = Mesh(sizes, names, mesh.device, tuple(mesh.links[i] for i in kept) if mesh.links else ())
    links = [one.name for one in mesh_links(mesh)]
    if [one.name for one in mesh_links(inner)] == [links[i] for i in kept]:
        return inner
    return Mesh(sizes, names, mesh.device, tuple(links[i] for i in kept))  # it leaves a node without filling it


def whole_mesh(plan: Plan) -> Mesh:
    """Return the mesh of all ranks of a plan: that of a stage with the pipeline axis put in."""
    inner, record = plan.mesh, plan.pipeline
    if record is None or record.ranks == 1:
        return inner
    sizes, names = list(inner.sizes), list(inner.names)
    if names == ["rank"] and sizes == [1]:
        sizes, names = [], []
    sizes.insert(record.axis, record.ranks)
    names.insert(record.axis, record.name)
    return Mesh(tuple(sizes), tuple(names), inner.device, pipeline=record.name)


def is_pipelined(mesh: Mesh, options: Options) -> bool:
    """Tell whether a step runs in micro-batches or stages, or is asked to."""
    asked = bool(options.schedule or options.cuts)
    return asked or mesh.pipeline_axis is not None or (options.micro_batches or 1) > 1


def choose_pipeline(program: Program, mesh: Mesh, options: Options) -> PipelineRecord:
    """Return what the options ask for, and what is left open filled in, but for the cuts.

    Without a backward, a number of micro-batches that does not divide the batch is lowered until it does.

    Raises:
        OptionError: the number of micro-batches does not divide the batch, or the schedule does not go with the stages.
        MeshError: stages are asked for, but the mesh has no pipeline axis.
    """
    axis = mesh.pipeline_axis
    ranks = 1 if axis is None else mesh.sizes[axis]
    if axis is None and (options.cuts or options.schedule):
        raise MeshError(
            f"stages are asked for (schedule={options.schedule!r}, cuts={options.cuts}), but no axis of {mesh} is "
            f"called {PIPELINE_AXIS!r}; name the pipeline axis so, or give example inputs to choose one by"
        )
    backward = any(role.kind == "tangent" for role in program.inputs)
    wanted = options.micro_batches or (1 if axis is None else _PER_STAGE * ranks)
    if options.micro_batches is None or not backward:
        batch = batch_size(program, 1)
        wanted = max(n for n in range(1, min(wanted, batch) + 1) if batch % n == 0)
    later = not (program.loss is not None and options.outputs != "full")
    schedule = options.schedule or ("gpipe" if ranks == 1 or later else "1f1b")
    return PipelineRecord(
        micro_batches=wanted,
        ranks=ranks,
        axis=axis or 0,
        name=PIPELINE_AXIS if axis is None else mesh.names[axis],
        schedule=schedule,
        cuts=options.cuts,
        norms=options.norms,
    )


def cut_program(program: Program, record: PipelineRecord, outputs: str) -> Program:
    """Return the program of a micro-batch that a plan with this record is for."""
    return micro_batches(program, record.micro_batches, outputs=outputs, staged=record.ranks > 1, norms=record.norms)


def make_pipeline_plan(
    program: Program, mesh: Mesh, options: Options, *, cut: Program | None = None, folded: bool = True
) -> Plan:
    """Return the plan of a program in micro-batches and stages.

    The split inside the stages is solved for the whole program on the mesh of one stage; stages are cut where the
    options say, or where the schedule takes least time (``choose_cuts``). The plan's seconds are those of the schedule.

    Args:
        program: of the whole batch.
        mesh: the whole mesh, with its pipeline axis if it has one.
        cut: what ``cut_program`` makes of it, if that is at hand.
    """
    from .choose_cuts import choose_cuts
    from .pipeline import make_plan  # whoever only runs a plan needs no solver
    from .price_stages import price_stages

    options = msgspec.structs.replace(options, overlap=bool(options.overlap))  # what hides would have to be simulated
    record = choose_pipeline(program, mesh, options)
    cut = cut if cut is not None else cut_program(program, record, options.outputs)
    cuts = record.cuts or choose_cuts(cut, mesh, record, options)
    assign_stages(cut, cuts)
    if (len(cuts) + 1) % record.ranks:
        raise OptionError(
            f"{len(cuts)} cuts make {len(cuts) + 1} stages, which {record.ranks} ranks of the axis {record.name!r} "
            "can't share evenly"
        )
    record = msgspec.structs.replace(record, cuts=tuple(cuts))
    trained = any(role.kind == "tangent" for role in cut.inputs)
    schedule = schedule_of(record, forward_only=not trained)
    budget = None if options.memory is None else options.memory * record.ranks
    inside = msgspec.structs.replace(options, memory=budget)
    price = partial(price_stages, cut, cuts=cuts, schedule=schedule, mesh=mesh) if record.ranks > 1 else None
    plan = make_plan(cut, stage_mesh(mesh), inside, folded=folded, loops=True, price=price)
    return msgspec.structs.replace(plan, pipeline=record, options=options)


def plan_program(program: Program, mesh: Mesh, options: Options) -> Plan:
    """Return the plan of a program of the whole batch: at once, or in micro-batches and stages.

    Where nobody says how many micro-batches, and the memory does not hold the whole batch at once, there are as few as
    fit.

    Raises:
        InfeasibleError: no plan fits the memory, however small the micro-batches.
    """
    from .pipeline import make_plan

    if is_pipelined(mesh, options):
        return make_pipeline_plan(program, mesh, options)
    try:
        return make_plan(program, mesh, options)
    except InfeasibleError as error:
        plan = _in_parts(program, mesh, options)
        if plan is None:
            raise error from None
        return plan


def _in_parts(program: Program, mesh: Mesh, options: Options) -> Plan | None:
    """Return the plan of the fewest micro-batches that fit the memory; None where none do or are asked for."""
    if options.micro_batches is not None or not any(role.kind == "tangent" for role in program.inputs):
        return None
    plan = None
    try:
        batch = batch_size(program, 1)
        counts = [count for count in range(2, batch + 1) if batch % count == 0]
        while counts:
            middle = len(counts) - 1 if plan is None else len(counts) // 2
            asked = msgspec.structs.replace(options, micro_batches=counts[middle])
            try:
                plan = make_pipeline_plan(program, mesh, asked)
                kept = msgspec.structs.replace(options, overlap=plan.options.overlap)
                plan = msgspec.structs.replace(plan, options=kept)
                counts = counts[:middle]
            except InfeasibleError:
                counts = [] if plan is None else counts[middle + 1 :]
    except OptionError:
        return plan
    return plan


def schedule_of(record: PipelineRecord, *, forward_only: bool = False) -> Schedule:
    """Return the table of a plan's schedule."""
    chunks = record.num_stages // record.ranks
    return make_schedule(record.schedule, record.ranks, record.micro_batches, chunks, forward_only=forward_only)


def stage_pieces(
    program: Program, plan: Plan, coordinate: Coordinate, *, run: bool = True
) -> tuple[LocalProgram, StagedProgram]:
    """Return the lowered program of a place in a stage's mesh, whole and cut into the plan's stages.

    Args:
        program: of a micro-batch (``cut_program``).
        plan: with a ``pipeline``.
        coordinate: the place.
        run: the segments will be called as modules.

    Raises:
        PlanError: the plan has no stages, or its cuts do not fit.
    """
    record = plan.pipeline
    if record is None:
        raise PlanError("the plan has neither micro-batches nor stages")
    stages = assign_stages(program, record.cuts)
    plan = save_at_cuts(program, plan, stages)

    def cut(local: LocalProgram) -> StagedProgram:
        return cut_stages(
            local,
            stages,
            record.num_stages,
            record.micro_batches,
            again=gathered_again(local, plan),
            split_backward=record.schedule in SPLITS_BACKWARD,
            callable_segments=run,
        )

    first = (0,) * plan.mesh.num_axes
    local = lower(program, plan, coordinate, run=False, improved=False)
    ranks = [cut(local)]
    if tuple(coordinate) != first and is_uneven(local.joint, program, plan.mesh):
        ranks.insert(0, cut(lower(program, plan, first, run=False, improved=False)))
    improve_stages(ranks, plan.mesh, plan.options.memory, plan.options.disable)
    return local, ranks[-1]


def gathered_again(local: LocalProgram, plan: Plan) -> list[fx.Node]:
    """Return the nodes that gather a parameter which the plan does not keep: they run for each micro-batch again.

    A copy that the plan keeps for the backward is gathered once a step.
    """
    kinds = {role.node: role.kind for role in local.inputs}
    kept = {(name, parse_layout(layout)) for name, layouts in plan.saved.items() for layout in layouts}
    out: list[fx.Node] = []
    for node in local.joint.graph.nodes:
        if "arc" not in node.meta or "layout" not in node.meta or kinds.get(node.meta["origin"]) != "parameter":
            continue
        if (node.meta["origin"], tuple(node.meta["layout"])) in kept:
            continue
        while "arc" in node.meta:
            out.append(node)
            inner = [source for source in node.all_input_nodes if "layout" not in source.meta]
            if not inner:
                break
            node = inner[0]
    return out
