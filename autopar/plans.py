"""The plan: frozen, serialisable, and all that lowering needs besides the program itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
from torch.distributed.tensor.placement_types import Placement

from autopar.errors import OptionError, PlanError
from autopar.placement import to_dtensor
from autopar.plan_format import check_plan, decode_plan, encode_plan, read_plan, write_plan
from autopar.plan_records import (
    SCHEMA,
    CollectiveRow,
    Cost,
    FrontierPoint,
    MemoryTable,
    MeshRecord,
    Options,
    PipelineRecord,
    PlanRecord,
    Route,
    SearchRecord,
    SolverReport,
    Struct,
)

__all__ = [
    "SCHEMA",
    "CollectiveRow",
    "Cost",
    "FrontierPoint",
    "MemoryTable",
    "MeshRecord",
    "Options",
    "PipelineRecord",
    "Plan",
    "PlanRecord",
    "Route",
    "SearchRecord",
    "SolverReport",
    "Struct",
    "check_plan",
]


MOST_REMEMBERED = 4
_TRACERS: dict[bytes, Callable[[int], tuple[FrontierPoint, ...]]] = {}


def remember_tracer(plan: PlanRecord, trace: Callable[[int], tuple[FrontierPoint, ...]]) -> None:
    """Let ``plan.frontier`` ask ``trace``; the last few plans of this process are remembered."""
    _TRACERS.pop(_question(plan), None)
    _TRACERS[_question(plan)] = trace
    while len(_TRACERS) > MOST_REMEMBERED:
        del _TRACERS[next(iter(_TRACERS))]


def _question(plan: PlanRecord) -> bytes:
    """Return what a frontier depends on: program, mesh and options, but not the budget."""
    options = msgspec.structs.replace(plan.options, memory=None)
    return msgspec.json.encode((plan.fingerprint, plan.mesh_record, options))


def _path(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise PlanError(f"the file of a plan is named by its path; got {type(path).__name__}")
    return Path(path)


class Plan(PlanRecord, frozen=True, kw_only=True):
    """The answer for one program on one mesh: what every op does, where every parameter rests, what it costs.

    ``print(plan)`` shows it; the attributes are those of ``PlanRecord``.

    >>> plan = Plan.load("plan.json")  # doctest: +SKIP
    >>> print(plan.explain("layers.0.mlp.up_proj"))  # doctest: +SKIP
    """

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of one step."""
        return self.cost.step_seconds

    @property
    def memory_bytes(self) -> int:
        """Predicted bytes on the fullest rank."""
        return self.memory.total_bytes

    @property
    def strategies(self) -> dict[str, str]:
        """Module path (or op node, where an op has no module) -> the technique on each axis: ``column over model``."""
        from autopar.report.technique import module_strategies

        return module_strategies(self)

    @property
    def placements(self) -> dict[str, tuple[Placement, ...]]:
        """Full name of a parameter or buffer -> its DTensor placements."""
        return {name: to_dtensor(self.layout(name)) for name in self.parameters}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON to ``path``; equal plans make equal files.

        Raises:
            PlanError: the plan breaks its own rules, or the file can't be written.
        """
        write_plan(self, _path(path))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Return the plan that ``save`` wrote; nothing in the file is run.

        Raises:
            PlanError: the file can't be read, is no plan, is of a newer schema, or contradicts itself.
        """
        return read_plan(_path(path), cls)

    def to_bytes(self) -> bytes:
        """Return the plan as canonical JSON: equal plans give equal bytes, in any process."""
        return encode_plan(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Plan:
        """Return the plan that ``to_bytes`` wrote.

        Raises:
            PlanError: as for ``load``.
        """
        return decode_plan(data, cls)

    def explain(self, name: str) -> str:
        """Return all that the plan says about one module, parameter, input or op node, as text.

        Raises:
            PlanError: the plan knows nothing by this name; the message has the nearest names.
        """
        from autopar.report.explain import explain_name

        if not isinstance(name, str):
            raise PlanError(f"explain takes the name of a module, parameter or op; got {type(name).__name__}")
        return explain_name(self, name)

    def diff(self, other: Plan) -> str:
        """Return as text what ``other`` does otherwise than this plan, and what that costs.

        Raises:
            PlanError: ``other`` is no plan.
        """
        from autopar.report.diff import diff_plans

        if not isinstance(other, Plan):
            raise PlanError(f"diff takes another autopar.Plan; got {type(other).__name__}; read a file by Plan.load")
        return diff_plans(self, other)

    def frontier(self, points: int = 6) -> tuple[FrontierPoint, ...]:
        """Return step time against memory budget: the best plan's for ``points`` budgets, the least possible first.

        Every point is a problem of its own that is solved here.

        Raises:
            PlanError: the model is not known in this process any more (the plan was loaded), or it is a plan of stages.
            OptionError: fewer than two points.
        """
        if isinstance(points, bool) or not isinstance(points, int) or points < 2:
            raise OptionError(f"frontier(points={points!r}): give at least 2, the ends of the curve")
        trace = _TRACERS.get(_question(self))
        if trace is None:
            raise PlanError(
                "the frontier needs the model, which a plan does not hold: ask the plan that autopar.plan returned in "
                "this process (the last few are remembered); plans of stages have none"
            )
        return trace(points)

    def __str__(self) -> str:
        from autopar.report.summary import summarize_plan

        return summarize_plan(self)

    def __repr__(self) -> str:
        return f"<Plan for {self.mesh}: {self.cost.step_seconds:.3g} s a step, {self.solver.status}>"
