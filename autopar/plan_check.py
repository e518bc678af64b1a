"""The invariants of a plan, held before one is written and after one is read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from autopar.errors import MeshError, PlanError
from autopar.placement import REPLICATE, Layout, is_partial, parse_layout, pieces_nonempty
from autopar.plan_records import SCHEMA, PlanRecord

PHASES = ("forward", "backward")
COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "slice")
INPUTS = ("global", "local")
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv")
OUTPUTS = ("auto", "full", "lie")

MAX_AXES = 16
MAX_RANKS = 1 << 24
MAX_DIMS = 64
MAX_TEXT = 4096
MAX_INT = (1 << 63) - 1


def check_plan(plan: PlanRecord) -> None:
    """Hold every structural invariant of ``plan``.

    That it fits a program (its ops, their choices, their tensors) is for lowering to say, by the fingerprint.

    Raises:
        PlanError: the first invariant that is broken, with the entry that breaks it.
    """
    if plan.schema != SCHEMA:
        _refuse(f"it has schema {plan.schema}, not {SCHEMA}")
    _check_texts(msgspec.to_builtins(plan))
    if not plan.fingerprint:
        _refuse("it has no fingerprint")
    _check_mesh(plan)
    _check_options(plan)
    _check_choices(plan)
    _check_resting(plan)
    _check_routes(plan)
    _check_numbers(plan)
    _check_collectives(plan)
    _check_pipeline(plan)


def _refuse(fault: str) -> None:
    raise PlanError(f"the plan contradicts itself: {fault}; plan again instead of editing it")


def _check_texts(tree: object) -> None:
    """Bound every text of the plan, names included, and keep out what a terminal would obey."""
    if isinstance(tree, str):
        if len(tree) > MAX_TEXT:
            _refuse(f"a text has {len(tree)} characters (at most {MAX_TEXT}): {tree[:40]!r}...")
        if not tree.isprintable():
            _refuse(f"a text has characters that can't be printed: {tree[:80]!r}")
    elif isinstance(tree, dict):
        _check_texts(list(tree))
        _check_texts(list(tree.values()))
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            _check_texts(item)


def _check_int(what: str, value: int, least: int = 0) -> None:
    if not least <= value <= MAX_INT:
        _refuse(f"{what} is {value if abs(value) <= MAX_INT else 'beyond 64 bits'}, outside {least} to {MAX_INT}")


def _check_float(what: str, value: float) -> None:
    if not math.isfinite(value) or value < 0:
        _refuse(f"{what} is {value}; it must be a finite number of at least 0")


def _check_one_of(what: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        _refuse(f"{what} is {value[:80]!r}, none of {', '.join(known)}")


def _check_mesh(plan: PlanRecord) -> None:
    record = plan.mesh_record
    if len(record.sizes) > MAX_AXES:
        _refuse(f"its mesh has {len(record.sizes)} axes (at most {MAX_AXES})")
    if any(not 1 <= size <= MAX_RANKS for size in record.sizes) or math.prod(record.sizes) > MAX_RANKS:
        _refuse(f"its mesh needs 1 to {MAX_RANKS} ranks on every axis and in all")
    if len(record.names) != len(record.sizes):
        _refuse(f"its mesh has {len(record.sizes)} axes and {len(record.names)} names")
    try:
        record.mesh()
    except MeshError as error:
        _refuse(str(error))


def _check_options(plan: PlanRecord) -> None:
    options = plan.options
    if options.memory is not None:
        _check_int("the memory budget", options.memory, least=1)
    _check_one_of("the option inputs", options.inputs, INPUTS)
    _check_one_of("the option outputs", options.outputs, OUTPUTS)
    for name, text in options.pinned.items():
        _check_complete(plan, f"the pinned layout of {name}", text)


def _check_pipeline(plan: PlanRecord) -> None:
    record = plan.pipeline
    if record is None:
        return
    _check_int("the number of micro-batches", record.micro_batches, least=1)
    _check_one_of("the schedule", record.schedule, SCHEDULES)
    if not 1 <= record.ranks <= MAX_RANKS:
        _refuse(f"its pipeline has {record.ranks} ranks, outside 1 to {MAX_RANKS}")
    if record.num_stages % record.ranks:
        _refuse(f"its {record.num_stages} stages can't lie on {record.ranks} ranks evenly")
    if not 0 <= record.axis <= len(plan.mesh_record.sizes) or record.name in plan.mesh_record.names:
        _refuse(f"its pipeline axis {record.name!r} has no place {record.axis} among {plan.mesh_record.names}")
    if len(set(record.cuts)) != len(record.cuts) or "" in record.cuts:
        _refuse("two of its stages start at the same place, or one at no place")


def _check_choices(plan: PlanRecord) -> None:
    num_axes = len(plan.mesh_record.sizes)
    for what, table in (("choices", plan.choices), ("roles", plan.roles)):
        for node, names in table.items():
            if len(names) != num_axes:
                _refuse(f"{what}[{node!r}] has {len(names)} entries for {num_axes} mesh axes")
    if not all(name for names in plan.choices.values() for name in names):
        _refuse("a choice has no name")
    _check_known("roles", plan.roles, plan.choices)
    _check_known("recomputed", plan.recomputed, plan.choices)
    if len(set(plan.recomputed)) != len(plan.recomputed):
        _refuse("an op is recomputed twice")
    for node, phase in plan.phases.items():
        _check_one_of(f"phases[{node[:80]!r}]", phase, PHASES)


def _check_known(what: str, names: Iterable[str], known: Mapping[str, object]) -> None:
    for name in names:
        if name not in known:
            _refuse(f"{what} names {name[:80]!r}, which the plan does not have")


def _check_resting(plan: PlanRecord) -> None:
    _check_known("parameter_shapes", plan.parameter_shapes, plan.parameters)
    for name, shape in plan.parameter_shapes.items():
        if len(shape) > MAX_DIMS:
            _refuse(f"{name} has {len(shape)} dims (at most {MAX_DIMS})")
        for size in shape:
            _check_int(f"a dim of {name}", size)
        _check_int(f"the number of elements of {name}", math.prod(shape))
    for name, text in plan.parameters.items():
        layout = _check_complete(plan, f"the layout of {name}", text)
        if name in plan.parameter_shapes:
            _check_pieces(plan, name, layout)
    for what, table in (("input", plan.inputs), ("output", plan.outputs)):
        for name, text in table.items():
            _check_complete(plan, f"the layout of the {what} {name}", text)


def _check_pieces(plan: PlanRecord, name: str, layout: Layout) -> None:
    shape, sizes = plan.parameter_shapes[name], plan.mesh_record.sizes
    for dim in sorted({code for code in layout if code >= 0}):
        if dim >= len(shape):
            _refuse(f"{name} has {len(shape)} dims and is split on dim {dim}")
        if not pieces_nonempty(shape[dim], [sizes[axis] for axis, code in enumerate(layout) if code == dim]):
            _refuse(f"dim {dim} of {name} has {shape[dim]} elements, too few for its split: a rank would have none")


def _parse(plan: PlanRecord, what: str, text: str) -> Layout:
    layout = parse_layout(text)
    if len(layout) != len(plan.mesh_record.sizes):
        _refuse(f"{what} is {text[:80]!r}: {len(layout)} placements for {len(plan.mesh_record.sizes)} mesh axes")
    if any(code >= MAX_DIMS for code in layout):
        _refuse(f"{what} is {text[:80]!r}: no tensor has more than {MAX_DIMS} dims")
    return layout


def _check_complete(plan: PlanRecord, what: str, text: str) -> Layout:
    layout = _parse(plan, what, text)
    if any(is_partial(code) for code in layout):
        _refuse(f"{what} is {text!r}, a partial value; only shards and replicas can rest")
    return layout


def _check_routes(plan: PlanRecord) -> None:
    seen: set[tuple[str, str]] = set()
    for route in plan.routes:
        _check_one_of(f"the phase of the route of {route.tensor[:80]}", route.phase, PHASES)
        if (route.tensor, route.phase) in seen:
            _refuse(f"{route.tensor} has two routes in its {route.phase}")
        seen.add((route.tensor, route.phase))
        if len(set(route.arcs)) != len(route.arcs):
            _refuse(f"the route of {route.tensor} in its {route.phase} lists an arc twice")
        for source, target in route.arcs:
            _check_arc(plan, route.tensor, source, target)
    for tensor, texts in plan.saved.items():
        if len(set(texts)) != len(texts):
            _refuse(f"{tensor} is saved twice in one layout")
        for text in texts:
            _parse(plan, f"a saved layout of {tensor}", text)


def _check_arc(plan: PlanRecord, tensor: str, source: str, target: str) -> None:
    what = f"an arc of {tensor}"
    start, end = _parse(plan, what, source), _parse(plan, what, target)
    changed = [axis for axis, (a, b) in enumerate(zip(start, end)) if a != b]
    if len(changed) != 1:
        _refuse(f"{what} goes from {source!r} to {target!r}: one collective changes one axis")
    if end[changed[0]] < REPLICATE:
        _refuse(f"{what} goes from {source!r} to {target!r}: no collective makes a partial value")


def _check_numbers(plan: PlanRecord) -> None:
    for record in (plan.cost, plan.memory, plan.solver, *filter(None, [plan.search])):
        for name in record.__struct_fields__:
            value = getattr(record, name)
            if isinstance(value, float):
                _check_float(name, value)
            elif isinstance(value, int):
                _check_int(name, value)
    if not plan.solver.status:
        _refuse("the solver has no status")


def _check_collectives(plan: PlanRecord) -> None:
    num_axes = len(plan.mesh_record.sizes)
    for row in plan.collectives:
        _check_one_of(f"the collective of {row.tensor}", row.kind, COLLECTIVES)
        _check_one_of(f"the phase of a collective of {row.tensor}", row.phase, PHASES)
        if not 0 <= row.axis < num_axes:
            _refuse(f"a collective of {row.tensor} is on axis {row.axis} of a mesh of {num_axes} axes")
        _check_int(f"the bytes of a collective of {row.tensor}", row.bytes)
        _check_float(f"the seconds of a collective of {row.tensor}", row.seconds)
