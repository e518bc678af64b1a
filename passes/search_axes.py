"""Try every axis of a mesh as the pipeline axis: bounds that cost next to nothing, then simulated schedules."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from autopar.errors import ConstraintError, LoweringError, OptionError
from autopar.mesh import Mesh
from autopar.plans import Options, PipelineRecord

from .annotate import annotate
from .choose_cuts import make_table, name_cuts, place_regions
from .cost.devices import mesh_links
from .cost.least_seconds import LeastSeconds
from .micro_batch_choices import batch_size
from .pipeline_plan import choose_pipeline, cut_program, stage_mesh
from .price_regions import PricedRegion, Work, price_regions
from .program import Program
from .schedules import SINGLE, Schedule

MARGIN = 0.05
"""A pipeline is taken when it promises to save more than this part of a step: prices are not truer than that."""

SCHEDULES = ("1f1b", "gpipe", "zero_bubble", "interleaved_1f1b", "zbv")
"""What is tried where no schedule is asked for."""


@dataclass(frozen=True)
class Trial:
    """An axis as the pipeline axis, and how the stages along it would run.

    Attributes:
        mesh: the whole mesh with that axis as its pipeline axis.
        micro_batches, schedule, cuts: of the stages; without cuts they are still to be chosen.
        step_s: of the simulated schedule without a memory budget; 0 where it was not simulated.
    """

    mesh: Mesh
    micro_batches: int
    schedule: str
    cuts: tuple[str, ...]
    step_s: float

    def ask(self, options: Options) -> Options:
        """Return the options under which this is planned."""
        return msgspec.structs.replace(
            options, micro_batches=self.micro_batches, schedule=self.schedule, cuts=self.cuts
        )


@dataclass(eq=False)
class AxisSearch:
    """A search over the axes of one mesh.

    Args:
        program: of the whole batch.
        mesh: without a pipeline axis.
        options: what is asked; micro-batches, schedule and cuts are kept.
        limit_s: a step that takes no less is not looked for.

    Attributes:
        considered, pruned, solved: axes: of more than one rank, left out by a bound, and priced.
        reasons: why others were left out.
    """

    program: Program
    mesh: Mesh
    options: Options
    limit_s: float
    considered: int = 0
    pruned: int = 0
    solved: int = 0
    reasons: list[str] = field(default_factory=list)
    _priced: dict[Hashable, tuple[PricedRegion, ...]] = field(default_factory=dict)

    def price(self, inner: Mesh) -> tuple[PricedRegion, ...]:
        """Return the regions of the whole batch on the mesh inside a stage; axes that are alike are priced once."""
        links = tuple(link.name for link in mesh_links(inner))
        key = inner.sizes, links, inner.names if self.options.constraints else ()
        if key not in self._priced:
            self._priced[key] = price_regions(self.program, inner, self.options)
        return self._priced[key]

    def trials(self) -> list[Trial]:
        """Return what is faster than the limit, the fastest first; of every axis what its schedules make best."""
        if any("rule" not in node.meta for node in self.program.ops()):
            annotate(self.program)
        least = LeastSeconds.of(self.program, self.mesh)
        out = []
        for name, size in zip(self.mesh.names, self.mesh.sizes):
            if size == 1:
                continue
            self.considered += 1
            axis = _Axis.of(self, replace(self.mesh, pipeline=name), least)
            if axis.bound_s() >= self.limit_s:
                self.pruned += 1
                continue
            self.solved += 1
            try:
                found = axis.best()
            except (ConstraintError, LoweringError, OptionError) as error:
                self.reasons.append(f"{name}: {error}")
                continue
            out += [found] if found else []
        return sorted(out, key=lambda trial: trial.step_s)


@dataclass(frozen=True, eq=False)
class _Axis:
    """One axis as the pipeline axis.

    Attributes:
        search: what it is part of.
        mesh: with the axis as its pipeline axis.
        record: what is usual there, or asked for.
        counts, schedules: numbers of micro-batches and schedules to try.
        least: of the program.
    """

    search: AxisSearch
    mesh: Mesh
    record: PipelineRecord
    counts: tuple[int, ...]
    schedules: tuple[str, ...]
    least: LeastSeconds

    @classmethod
    def of(cls, search: AxisSearch, mesh: Mesh, least: LeastSeconds) -> _Axis:
        record = choose_pipeline(search.program, mesh, search.options)
        fixed = search.options.schedule or record.schedule == "gpipe"
        batch, usual = batch_size(search.program, 1), record.micro_batches
        inside = mesh.num_ranks // record.ranks
        around = {usual, 2 * usual, usual // 2, batch // inside}
        least_count = min(record.ranks, usual)  # fewer than stages would leave most ranks waiting
        counts = {n for n in around if n >= least_count and batch % n == 0}
        counts = {usual} if search.options.micro_batches else counts
        names = (record.schedule,) if fixed else SCHEDULES
        return cls(search, mesh, record, tuple(sorted(counts)), names, least)

    def bound_s(self) -> float:
        """Return a lower bound on what the axis can come to."""
        chunks = 1 if set(self.schedules) <= set(SINGLE) else 2
        return min(self.least.seconds(self.record.ranks, chunks, count) for count in self.counts)

    def best(self) -> Trial | None:
        """Return the best trial, if it is faster than the limit; the program is cut only where it may be."""
        options, record = self.search.options, self.record
        if options.cuts:
            return Trial(self.mesh, record.micro_batches, record.schedule, options.cuts, 0.0)
        whole = self.search.price(stage_mesh(self.mesh))
        shares = {count: self._shared(whole, count) for count in self.counts}
        if len(whole) < record.ranks:
            regions = _even(shares[record.micro_batches], record.ranks)
            found = self._fastest(regions, record.micro_batches, self.search.limit_s)
            return Trial(self.mesh, record.micro_batches, record.schedule, (), found[0]) if found else None
        best, limit_s = None, self.search.limit_s
        for hope_s, count in self._hopes(shares):
            trial = self._cut(count, limit_s) if hope_s < limit_s else None
            if trial is not None:
                best, limit_s = trial, trial.step_s
        return best

    def _hopes(self, shares: Mapping[int, Sequence[PricedRegion]]) -> list[tuple[float, int]]:
        """Return the numbers of micro-batches worth a cut, with what they may come to at best: two at most.

        The best of those that leave every rank inside a stage a row, and then the usual one or the best of the others:
        those can't split the batch evenly, which prices of the whole batch don't see.
        """
        batch, ranks = batch_size(self.search.program, 1), self.mesh.num_ranks // self.record.ranks
        found: dict[bool, list[tuple[bool, float, int]]] = {True: [], False: []}
        for count in self.counts:
            hope = self._fastest(shares[count], count, self.search.limit_s)
            if hope is not None:
                even = batch // count % ranks == 0
                found[even].append((not even and count != self.record.micro_batches, hope[0], count))
        return [min(found[even])[1:] for even in (True, False) if found[even]]

    def _cut(self, count: int, limit_s: float) -> Trial | None:
        """Return the best trial with so many micro-batches, with cuts as good as those of an axis called ``pp``."""
        asked = msgspec.structs.replace(self.record, micro_batches=count)
        cut = cut_program(self.search.program, asked, self.search.options.outputs)
        priced = price_regions(cut, stage_mesh(self.mesh), self.search.options, loops=True)
        found = self._fastest(priced, count, limit_s)
        if found is None:
            return None
        placed = place_regions(priced, self._table(count, found[1]), self.mesh, self.search.options.optimizer)
        return Trial(self.mesh, count, found[1], name_cuts(cut, placed), placed.makespan_s) if placed else None

    def _fastest(self, regions: Sequence[PricedRegion], count: int, limit_s: float) -> tuple[float, str] | None:
        """Return the seconds and the name of the fastest schedule that is faster than the limit."""
        found = []
        for name in self.schedules:
            table = self._table(count, name)
            placed = place_regions(regions, table, self.mesh, self.search.options.optimizer, exact=False)
            if placed is not None and placed.makespan_s < limit_s:
                found.append((placed.makespan_s, name))
        return min(found, default=None)

    def _table(self, count: int, schedule: str) -> Schedule:
        return make_table(msgspec.structs.replace(self.record, schedule=schedule, micro_batches=count))

    def _shared(self, whole: Sequence[PricedRegion], count: int) -> list[PricedRegion]:
        """Return the regions of one of ``count`` micro-batches that share all but the launches of the whole batch."""
        out = []
        for at, region in enumerate(whole):
            parts = zip((region.forward, region.input, region.weight), self.least.launches(at), strict=True)
            forward, inputs, weights = (
                work.times(*(1.0 / count,) * 4) + Work(streams=launch_s * (1.0 - 1.0 / count))
                for work, launch_s in parts
            )
            sent = region.send_bytes // count
            out.append(replace(region, forward=forward, input=inputs, weight=weights, send_bytes=sent))
        return out


def _even(regions: Sequence[PricedRegion], number: int) -> list[PricedRegion]:
    """Return so many equal regions with the work of fewer."""
    works = ([getattr(region, part) for region in regions] for part in ("forward", "input", "weight"))
    forward, inputs, weights = (sum(parts, Work()).times(*(1.0 / number,) * 4) for parts in works)
    sent = max(region.send_bytes for region in regions)
    one = replace(regions[0], forward=forward, input=inputs, weight=weights, parameters=(), send_bytes=sent)
    return [one] * number


def refuse_stages(program: Program, options: Options, *, needed: bool) -> str:
    """Return why no axis is tried as the pipeline axis, or nothing.

    Stages that nobody asked for must not change what a call returns, nor what may be done with it.

    Args:
        program: of the whole batch.
        options: what is asked.
        needed: nothing fits the memory without.
    """
    asked = bool(options.schedule or options.cuts)
    if not any(role.kind == "tangent" for role in program.inputs):
        return "" if asked else "it has no backward"
    if options.inputs == "local":
        return "inputs='local' fixes what the axes of the mesh carry"
    if options.micro_batches == 1 and not asked:
        return "one micro-batch is asked for, and stages would wait for each other"
    if asked:
        return ""
    try:
        if batch_size(program, 1) < 2:
            return "its batch is one row"
    except OptionError as error:
        return str(error)
    if program.loss is None or options.outputs != "auto":
        return "outputs that are differentiated would have to be, all at once"
    beside = [
        role.name
        for role in program.outputs
        if role.kind == "output" and role.index != program.loss and (role.node is not None or role.constant is not None)
    ]
    if beside and options.micro_batches is None and not needed:
        return f"what is returned beside the loss ({', '.join(beside[:3])}) would be left out"
    return ""
