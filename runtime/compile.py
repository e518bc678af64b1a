"""From a call to an executable: every rank traces, the first rank plans, every rank checks and lowers."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from autopar.errors import PlanError
from autopar.passes.pipeline_plan import cut_program, stage_mesh, stage_pieces, whole_mesh
from autopar.passes.program import Program
from autopar.plans import Options, Plan
from autopar.runtime.agree import share_bytes
from autopar.runtime.choose_axis import choose_axis
from autopar.runtime.execute import Executable
from autopar.runtime.fit_staged_memory import fit_staged_memory
from autopar.runtime.groups import MeshGroups
from autopar.runtime.shadow import Source
from autopar.runtime.signature import Call
from autopar.runtime.stage_groups import StageGroups
from autopar.runtime.staged_executable import StagedExecutable
from autopar.runtime.state import share_tensor


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Put off Python's search for garbage in cycles: graphs are many objects, all alive, and it walks them in vain."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True)
class Compiler:
    """Makes executables for the calls of one module.

    Attributes:
        source: what is traced.
        stage: the processes, and this rank's place among stages.
        compiled: what a program computes between its collectives is compiled.
    """

    source: Source
    stage: StageGroups
    compiled: bool = False

    @property
    def groups(self) -> MeshGroups:
        """All processes."""
        return self.stage.whole

    @_without_collecting()
    def make(
        self,
        call: Call,
        options: Options,
        plan: Plan | None,
        *,
        every_output: bool = False,
        program: Program | None = None,
    ) -> Executable | StagedExecutable:
        """Return the executable for a call. Collective.

        Args:
            call: the inputs.
            options: what is asked of the plan; the first rank's count.
            plan: a plan to use; None to make one.
            every_output: differentiate the outputs beside a loss too, as ``outputs="full"`` does by itself.
            program: the traced call, where it was traced to plan for it.

        Raises:
            AutoparError: on every rank, when any rank fails to trace, plan, check or lower.
        """
        groups = self.groups
        program = program or self._trace(call, options, plan, every_output)
        plan = plan or self._plan(partial(fit_staged_memory, program, groups.mesh, options))
        if plan.options.disable != options.disable:
            plan = disable(plan, options.disable)
        with groups.together("cutting the batch into micro-batches"):
            if plan.pipeline is not None:
                program = cut_program(program, plan.pipeline, plan.options.outputs)
        with groups.together("applying the plan"):
            check_fit(plan, program, groups)
        share_constants(program, groups)
        with groups.together("lowering"):
            executable = _lower(program, plan, self.stage, self.compiled)
        return executable

    @_without_collecting()
    def plan_first(self, call: Call, options: Options) -> tuple[Program, Plan]:
        """Return the traced call and its plan, which may have stages along any axis of an open mesh. Collective.

        Raises:
            AutoparError: on every rank, when any rank fails to trace or plan.
        """
        program = self._trace(call, options, None, False)
        return program, self._plan(partial(choose_axis, program, self.groups.mesh, options))

    def _trace(self, call: Call, options: Options, plan: Plan | None, every_output: bool) -> Program:
        with self.groups.together("tracing the model"):
            return self._capture(call, options, every_output or options.outputs == "full", plan)

    def _plan(self, make: Callable[[], Plan]) -> Plan:
        """Return the plan that the first rank makes."""
        groups, made = self.groups, None
        with groups.together("planning"):
            if groups.rank == 0:
                made = make().to_bytes()
        return Plan.from_bytes(share_bytes(groups.control, made))

    def _capture(self, call: Call, options: Options, every_output: bool, plan: Plan | None) -> Program:
        from autopar.passes.annotate import annotate

        mesh = self.stage.stage.mesh
        fingerprint = "" if plan is None else plan.fingerprint
        capture = self.source.capture
        return annotate(capture(call, mesh, options.inputs, every_output=every_output, fingerprint=fingerprint))


def _lower(program: Program, plan: Plan, groups: StageGroups, compiled: bool) -> Executable | StagedExecutable:
    from autopar.passes.lower import lower

    coordinate = groups.stage.coordinate
    lowered = disable(plan, (*plan.options.disable, *_left_out(groups.stage, compiled)))
    if plan.pipeline is not None:
        pieces = stage_pieces(program, lowered, coordinate)
        return StagedExecutable(program, plan, *pieces, groups, compiled=compiled)
    local = lower(program, lowered, coordinate, run=False)
    return Executable(program, plan, local, groups.whole, compiled=compiled)


def _left_out(stage: MeshGroups, compiled: bool) -> tuple[str, ...]:
    """Return the passes that don't fit how the program runs.

    Compiled code may return one memory for two equal values, which nobody may then write into. Collectives on several
    axes need groups along these.
    """
    return (("reduce_in_place", "write_in_place") if compiled else ()) + (() if stage.joins_axes else ("join_axes",))


def disable(plan: Plan, names: Iterable[str]) -> Plan:
    """Return the plan with these passes over its lowered program left out, and no others."""
    options = msgspec.structs.replace(plan.options, disable=tuple(sorted(set(names))))
    return msgspec.structs.replace(plan, options=options)


def share_plan(groups: MeshGroups, plan: Plan | str | os.PathLike[str] | None) -> Plan | None:
    """Return the first rank's plan on every rank, loaded from a file where it is a path. Collective.

    Raises:
        PlanError: on every rank, when the file is damaged or the plan is for another mesh.
    """
    data = b""
    with groups.together("loading the plan"):
        if plan is not None and groups.rank == 0:
            loaded = plan if isinstance(plan, Plan) else Plan.load(plan)
            check_mesh_of(loaded, groups)
            data = loaded.to_bytes()
    data = share_bytes(groups.control, data)
    return Plan.from_bytes(data) if data else None


def share_constants(program: Program, groups: MeshGroups) -> None:
    """Give every rank the first rank's values of the tensors that the module holds as plain attributes. Collective."""
    for name in sorted({str(node.target) for node in program.graph.nodes if node.op == "get_attr"}):
        value = getattr(program.graph_module, name)
        if isinstance(value, torch.Tensor):
            setattr(program.graph_module, name, share_tensor(value, groups).to(value.device))


def check_mesh_of(plan: Plan, groups: MeshGroups) -> None:
    """Check that a plan is for this mesh.

    Raises:
        PlanError: it is for a mesh of other sizes, or with another pipeline axis than this mesh names.
    """
    mesh, record = groups.mesh, plan.pipeline
    made, axis = whole_mesh(plan), mesh.pipeline_axis
    if record is not None and record.ranks == 1 and axis is not None and mesh.sizes[axis] == 1:
        mesh, axis = stage_mesh(mesh), None
    staged = made.pipeline_axis
    if made.sizes != mesh.sizes or (staged != axis and (axis is not None or mesh.pipeline is not None)):
        stages = "" if staged is None or record is None else f" in {record.num_stages} stages along {record.name}"
        raise PlanError(
            f"the plan was made for a mesh of sizes {made.sizes}{stages}, but this one is {groups.mesh}; make a plan "
            "for this mesh, or run on that one"
        )


def check_fit(plan: Plan, program: Program, groups: MeshGroups) -> None:
    """Check that a plan is for this program and mesh.

    Raises:
        PlanError: it is for another one.
    """
    check_mesh_of(plan, groups)
    found = program.fingerprint()
    if plan.fingerprint != found:
        raise PlanError(
            f"the plan was made for another program (fingerprint {plan.fingerprint[:12]}, this rank's model and inputs "
            f"give {found[:12]}); give the model, inputs, modes and versions that the plan was made with, or plan again"
        )
