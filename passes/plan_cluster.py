"""Plan a program for a whole cluster: search its shape, then split the program on the mesh that was found."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from autopar.errors import InfeasibleError, LoweringError, OptionError
from autopar.mesh import PIPELINE_AXIS, Mesh
from autopar.plans import Options, Plan, SearchRecord

from .annotate import annotate
from .candidates import Candidate, Limits
from .cost.devices import device
from .find_regions import Span, find_regions
from .hardware import Hardware
from .micro_batch_choices import batch_size
from .micro_batches import micro_batches
from .name_roles import name_roles
from .pipeline import make_plan
from .pipeline_plan import choose_pipeline, cut_program, is_pipelined, make_pipeline_plan
from .price_regions import PricedRegion, price_regions
from .program import Program
from .search_cluster import SPARE, ClusterSearch, ClusterSearcher, hardware_conditions

RUNNERS_UP = 5
"""Other configurations that a plan names."""


def plan_cluster(program: Program, hardware: Hardware, options: Options, default: Mesh) -> Plan:
    """Return the plan of a program on the mesh, with the stages and micro-batches, that a search of the cluster finds.

    A program that can't be searched (no backward, no batch, a sum over the batch in the middle of it such as a batch
    norm's, inputs that every rank passes its share of) is planned on ``default``, and the plan says why.

    Args:
        program: of the whole batch.
        hardware: the cluster.
        options: what is asked; its micro-batches, schedule and cuts limit the search.
        default: the mesh of nodes and devices.

    Raises:
        OptionError: no factorisation of the cluster divides the batch as asked, or a cut names no region.
        InfeasibleError: nothing fits the memory; it says how many devices would do.
        ConstraintError, MeshError: as ``make_plan``.
    """
    annotate(program)
    refused = _refusal(program, options)
    if refused:
        plan = make_plan(program, default, options)
        return msgspec.structs.replace(plan, search=SearchRecord(note=f"not searched: {refused}"))
    spans = find_regions(program)
    pricing = _Pricing(program, options)
    searcher = ClusterSearcher(
        hardware,
        batch_size(program, 1),
        pricing.price,
        len(spans),
        hardware_conditions(hardware, options.optimizer),
        options.memory or int(SPARE * device(hardware.device).memory_bytes),
        _limits(options, spans),
    )
    found = searcher.search()
    return _plan_found(program, hardware, options, found, spans)


def _refusal(program: Program, options: Options) -> str:
    """Return why a program can't be searched, or nothing."""
    if not any(role.kind == "tangent" for role in program.inputs):
        return "it has no backward"
    if options.inputs == "local":
        return "inputs='local' fixes the first axis of the mesh"
    try:
        batch = batch_size(program, 1)
        if batch > 1:
            divisor = next(count for count in range(2, batch + 1) if batch % count == 0)
            micro_batches(program, divisor, outputs="auto")
    except (OptionError, LoweringError) as error:
        return str(error)
    return ""


class _Pricing:
    """Prices regions of parts of the batch, each part's program made once."""

    def __init__(self, program: Program, options: Options) -> None:
        self.program, self.options = program, options
        self.batch = batch_size(program, 1)
        self.parts: dict[int, Program] = {self.batch: program}

    def price(self, mesh: Mesh, samples: int) -> tuple[PricedRegion, ...]:
        if samples not in self.parts:
            self.parts[samples] = micro_batches(self.program, self.batch // samples, outputs="auto")
        return price_regions(self.parts[samples], mesh, self.options)


def _limits(options: Options, spans: Sequence[Span]) -> Limits:
    pinned = []
    for cut in options.cuts:
        at = next((index for index, span in enumerate(spans) if cut in (span.name, *span.ops[:1])), 0)
        if at == 0:
            names = ", ".join(span.name for span in spans[1:9])
            raise OptionError(f"no stage can start at {cut!r} in a search; stages start at regions: {names}, ...")
        pinned.append(at)
    return Limits(
        micro_batches=(options.micro_batches,) if options.micro_batches else (),
        schedules=(options.schedule,) if options.schedule else (),
        pinned=tuple(pinned),
    )


def cluster_mesh(hardware: Hardware, candidate: Candidate) -> Mesh:
    """Return the mesh of a candidate: axes ``pp``, ``data`` and ``model`` of more than one rank, with their links."""
    inner = ("model",) if len(candidate.inner) == 1 else tuple(f"model{at}" for at in range(len(candidate.inner)))
    names = (PIPELINE_AXIS, "data", *inner)
    axes = zip(names, candidate.sizes, hardware.links(candidate.sizes), strict=True)
    kept = [axis for axis in axes if axis[1] > 1] or [("data", 1, hardware.link_inside)]
    return Mesh(
        tuple(size for _, size, _ in kept),
        tuple(name for name, _, _ in kept),
        hardware.device,
        tuple(link for _, _, link in kept),
    )


def _plan_found(
    program: Program, hardware: Hardware, options: Options, found: ClusterSearch, spans: Sequence[Span]
) -> Plan:
    candidate, placement = found.best.candidate, found.best.placement
    mesh = cluster_mesh(hardware, candidate)
    staged = candidate.stages > 1
    asked = msgspec.structs.replace(
        options,
        micro_batches=candidate.micro_batches,
        schedule=candidate.schedule if staged else "",
        cuts=tuple(_cut_name(spans[first]) for first in placement.firsts[1:]),
    )
    pipelined = is_pipelined(mesh, asked)
    budget = options.memory or int(SPARE * device(hardware.device).memory_bytes)
    note = ""
    cut = cut_program(program, choose_pipeline(program, mesh, asked), options.outputs) if pipelined else program
    batched = {**split_batch(cut, candidate.data), **options.constraints}
    asked = msgspec.structs.replace(asked, constraints=batched)
    try:
        plan = _make(program, mesh, msgspec.structs.replace(asked, memory=budget), cut, pipelined)
    except InfeasibleError as error:
        note = f"split without the memory bound, which the split alone can't meet: {error}"
        plan = _make(program, mesh, asked, cut, pipelined)
    step_s, busy_s = placement.makespan_s, max(placement.simulation.busy_s)
    return msgspec.structs.replace(
        plan,
        options=msgspec.structs.replace(plan.options, memory=options.memory, constraints=options.constraints),
        cost=msgspec.structs.replace(
            plan.cost,
            step_seconds=step_s,
            compute_seconds=busy_s,
            communication_seconds=step_s - busy_s,
            hidden_seconds=0.0,
        )
        if pipelined
        else plan.cost,
        search=_record(found, note[:4000]),
    )


def _make(program: Program, mesh: Mesh, options: Options, cut: Program, pipelined: bool) -> Plan:
    return make_pipeline_plan(program, mesh, options, cut=cut) if pipelined else make_plan(program, mesh, options)


def split_batch(program: Program, data: int) -> dict[str, str]:
    """Return the constraints that split the batch of every forward op that has one over the axis ``data``.

    The search prices the data axis so; what else there is to split is left to the solver.
    """
    if data == 1:
        return {}
    if any("rule" not in node.meta for node in program.ops()):
        annotate(program)
    roles = name_roles(program)
    out = {}
    for node in program.ops():
        if node.meta["phase"] != "forward":
            continue
        named, rule = roles.get(node.name, {}), node.meta["rule"]
        choices = {choice.name for choice in rule.choices()}
        batch = (factor for factor in rule.factors if named.get(factor.name) == "batch")
        if any(factor.size % data == 0 and factor.name in choices for factor in batch):
            out[f"op:{node.name}"] = "batch@data"
    return out


def _cut_name(span: Span) -> str:
    return span.ops[0] if "#" in span.name else span.name


def _record(found: ClusterSearch, note: str) -> SearchRecord:
    simulation = found.best.placement.simulation
    if found.left:
        note = f"{found.left} candidates were not placed: the bound is below theirs; {note}".rstrip("; ")
    others = [one for one in found.ranked if one.candidate != found.best.candidate]
    return SearchRecord(
        chosen=str(found.best.candidate),
        step_seconds=found.best.step_s,
        bound_seconds=found.bound_s,
        bubble_share=simulation.bubble_share,
        peak_bytes=max(simulation.peak_bytes),
        considered=found.considered,
        pruned=found.pruned,
        solved=found.solved,
        others=tuple((str(one.candidate), one.step_s) for one in others[:RUNNERS_UP]),
        note=note,
    )
