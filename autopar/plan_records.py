"""The records that a plan is made of: frozen, typed, JSON one for one."""

from __future__ import annotations

import msgspec

from autopar.mesh import Mesh
from autopar.placement import Layout, parse_layout

SCHEMA = 1


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record of a plan: JSON with every field checked by type."""


class MeshRecord(Struct, frozen=True, kw_only=True):
    """The mesh that a plan was made for."""

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    device: str
    links: tuple[str, ...] = ()

    def mesh(self) -> Mesh:
        """Return the mesh itself."""
        return Mesh(self.sizes, self.names, self.device, self.links)


class Options(Struct, frozen=True, kw_only=True):
    """What was asked: everything besides model, mesh and example inputs that the answer depends on.

    Attributes:
        optimizer: its name as ``passes.cost.memory`` knows it (``adamw``, ``sgd``, ...); sets the state of a parameter.
        memory: budget in bytes for each rank, or None.
        at_once: the budget bounds what is alive at once in the lowered program too, not only what is kept.
        constraints: pattern of a module or parameter -> technique or layout.
        inputs: ``"global"`` (each rank passes the global batch) or ``"local"`` (its share of dim 0 over
            the first axis).
        outputs: ``"auto"`` (full tensors, or where they lie beside a loss), ``"full"`` or ``"lie"``.
        pinned: full name -> layout of parameters that already lie somewhere (a second input shape).
        micro_batches: parts of the batch that run one after the other; None to leave it to the planner.
        schedule: name of the pipeline schedule, or empty to leave it to the planner.
        cuts: module or forward op at which each stage but the first starts; empty to leave it to the planner.
        recompute: forward tensors may be computed again in the backward where the budget asks for it.
        norms: batch norms that may take the statistics of each micro-batch for those of the batch.
        disable: passes over the lowered program that are left out (``passes.improve``).
        overlap: communication that can run behind the compute of its region is priced as hidden there; None: where
            the best plan by such prices is found and proved at little cost. A plan says which it was.
    """

    optimizer: str = "adamw"
    memory: int | None = None
    at_once: bool = False
    constraints: dict[str, str] = {}
    inputs: str = "global"
    outputs: str = "auto"
    pinned: dict[str, str] = {}
    micro_batches: int | None = None
    schedule: str = ""
    cuts: tuple[str, ...] = ()
    recompute: bool = True
    norms: tuple[str, ...] = ()
    disable: tuple[str, ...] = ()
    overlap: bool | None = False


class Route(Struct, frozen=True, kw_only=True):
    """The arcs that one tensor travels in one phase: ``(source layout, target layout)`` pairs, each one collective.

    Listed so that every arc starts at a layout that is already there. ``tensor`` names an FX node. ``phase`` is
    ``"forward"`` or ``"backward"``: the two phases hold separate copies. A backward phase of a forward tensor starts
    from the layouts in ``Plan.saved``; parameters, buffers and inputs start, in both phases, from where they rest.
    """

    tensor: str
    phase: str
    arcs: tuple[tuple[str, str], ...]


class CollectiveRow(Struct, frozen=True, kw_only=True):
    """One collective that a step runs: its kind, axis, tensor, bytes that one rank hands in, seconds and reason."""

    kind: str
    axis: int
    tensor: str
    phase: str
    bytes: int
    seconds: float
    reason: str = ""


class Cost(Struct, frozen=True, kw_only=True):
    """Predicted seconds of a step on one rank.

    Attributes:
        step_seconds: compute, and the communication that nothing hides.
        compute_seconds: of ops, those computed again included.
        communication_seconds: of all collectives.
        hidden_seconds: the part of them that runs behind compute.
    """

    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    hidden_seconds: float = 0.0

    @property
    def exposed_seconds(self) -> float:
        """The communication that nothing hides."""
        return self.communication_seconds - self.hidden_seconds


class MemoryTable(Struct, frozen=True, kw_only=True):
    """Predicted bytes on the fullest rank.

    Attributes:
        parameters_bytes, gradients_bytes, optimizer_bytes, buffers_bytes, saved_bytes: kept, each at its most.
        total_bytes: their sum, which the budget bounds. They are never all there at once.
        inputs_bytes: of inputs and outputs, at the highest moment of the lowered program.
        temporaries_bytes: of everything that no other row counts, gathered copies among it, at that moment.
        gather_bytes: of the largest single gather, at any time.
        peak_bytes: everything that is alive at the highest moment; 0 where the plan was not lowered.
        peak_at: the node of the lowered program that runs then.
        reserve_bytes: how much less than the budget is kept, so that the highest moment fits as well; the plan is
            optimal among those that keep so much less.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    buffers_bytes: int
    saved_bytes: int
    total_bytes: int
    inputs_bytes: int = 0
    temporaries_bytes: int = 0
    gather_bytes: int = 0
    peak_bytes: int = 0
    peak_at: str = ""
    reserve_bytes: int = 0


class FrontierPoint(Struct, frozen=True, kw_only=True):
    """The best plan within one budget.

    Attributes:
        budget_bytes: what a rank may keep.
        step_seconds: predicted.
        memory_bytes: what the plan keeps.
        recomputed: how many forward ops it computes again.
        status: of the solver.
    """

    budget_bytes: int
    step_seconds: float
    memory_bytes: int
    recomputed: int
    status: str


class SolverReport(Struct, frozen=True, kw_only=True):
    """How the plan was found and how sure it is.

    Attributes:
        status: ``"optimal"`` when that is proved; ``"given"`` for a plan that nobody solved for.
        objective_s, bound_s, gap: seconds of this plan, a lower bound on those of any plan, their relative distance.
        seconds: that solving took. Told where it was solved, neither compared nor written to files (0 there), so
            that the same question gives the same plan, byte for byte.
        variables, constraints: size of the problem.
        regions: repeated blocks that share their decisions.
        next_gb_s: seconds a step that another 10^9 bytes of budget can save at most, by the price that the relaxation
            puts on memory; 0 where the budget does not bind.
    """

    status: str
    objective_s: float
    bound_s: float
    gap: float
    seconds: float
    variables: int
    constraints: int
    regions: int = 0
    next_gb_s: float = 0.0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SolverReport):
            return NotImplemented
        mine, theirs = msgspec.structs.replace(self, seconds=0.0), msgspec.structs.replace(other, seconds=0.0)
        return msgspec.structs.astuple(mine) == msgspec.structs.astuple(theirs)


class PipelineRecord(Struct, frozen=True, kw_only=True):
    """How a step is cut into micro-batches, and a model into stages.

    Attributes:
        micro_batches: parts of the batch that run one after the other.
        ranks: of the pipeline axis; 1 where there are micro-batches alone. The plan's own mesh is that of one stage.
        axis, name: where the pipeline axis stands among the axes of the whole mesh, and what it is called.
        schedule: its name (``passes.schedules``).
        cuts: the first forward op of every stage but the first, in the order of the graph.
        norms: modules that take the statistics of each micro-batch for those of the batch.
    """

    micro_batches: int
    ranks: int = 1
    axis: int = 0
    name: str = "pp"
    schedule: str = "gpipe"
    cuts: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()

    @property
    def num_stages(self) -> int:
        """The number of stages, a multiple of ``ranks``."""
        return len(self.cuts) + 1


class SearchRecord(Struct, frozen=True, kw_only=True):
    """How the shape of the mesh, the stages and the micro-batches were found on a whole cluster; or the pipeline axis.

    Attributes:
        chosen: the configuration in words; empty where there are no stages.
        step_seconds, bound_seconds: of the simulated schedule, and a lower bound on those of any configuration; no
            bound (0) for the pipeline axis of a mesh.
        bubble_share: the part of the step in which the busiest rank waits.
        peak_bytes: of the fullest rank.
        considered, pruned, solved: configurations, or axes: all, those left out by a bound, those whose stages were
            placed.
        others: the next best ones with their seconds.
        note: why nothing was searched, why there are no stages, or what the split could not keep.
    """

    chosen: str = ""
    step_seconds: float = 0.0
    bound_seconds: float = 0.0
    bubble_share: float = 0.0
    peak_bytes: int = 0
    considered: int = 0
    pruned: int = 0
    solved: int = 0
    others: tuple[tuple[str, float], ...] = ()
    note: str = ""


class PlanRecord(Struct, frozen=True, kw_only=True):
    """The frozen answer for one program on one mesh, as it is written to a file; ``Plan`` is the same with its methods.

    Attributes:
        schema: version of this format.
        fingerprint: digest of the program that it was made for.
        choices: op node -> name of the rule's ``Choice`` on each axis.
        parameters: full name -> layout where a parameter (or buffer) rests; aliases are not listed.
        inputs: path -> layout in which a rank passes the input.
        outputs: path -> layout in which the module returns the leaf.
        routes: how tensors travel.
        saved: forward tensor -> layouts kept for the backward. Of a parameter: gathered copies that are kept until its
            gradient is computed, beside where it rests (ZeRO-1 and ZeRO-2); what rests is not listed.
        recomputed: forward ops that the backward computes again, at first need, in graph order.
        roles: op node -> what people call the split on each axis (``column``, ``batch``, ...; empty if replicated).
        modules: op node -> module path, for reports.
        parameter_shapes: full name of a parameter or buffer -> its global shape, for reports.
        phases: op node -> ``"forward"`` or ``"backward"``, for reports.
        placeholders: full name of a parameter or buffer, or path of an input -> the node that carries it, for reports.
        gradients: full name of a parameter -> the node that computes its gradient, for reports.
        pipeline: micro-batches and stages; None where the whole batch runs at once on the whole mesh.
        search: how the mesh was found; None where it was given.
    """

    schema: int = SCHEMA
    fingerprint: str
    mesh_record: MeshRecord
    options: Options
    choices: dict[str, tuple[str, ...]]
    parameters: dict[str, str]
    inputs: dict[str, str]
    outputs: dict[str, str]
    routes: tuple[Route, ...]
    saved: dict[str, tuple[str, ...]]
    recomputed: tuple[str, ...] = ()
    cost: Cost
    memory: MemoryTable
    collectives: tuple[CollectiveRow, ...]
    solver: SolverReport
    roles: dict[str, tuple[str, ...]] = {}
    modules: dict[str, str] = {}
    parameter_shapes: dict[str, tuple[int, ...]] = {}
    phases: dict[str, str] = {}
    placeholders: dict[str, str] = {}
    gradients: dict[str, str] = {}
    pipeline: PipelineRecord | None = None
    search: SearchRecord | None = None

    @property
    def mesh(self) -> Mesh:
        """The mesh that the plan was made for."""
        return self.mesh_record.mesh()

    def layout(self, name: str) -> Layout:
        """Return where the parameter or buffer ``name`` rests."""
        return parse_layout(self.parameters[name])
