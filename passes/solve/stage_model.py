"""The integer program of stage cuts: how many regions of each run and variant every stage gets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ortools.linear_solver.python import model_builder

from autopar.errors import AutoparError

from ..schedules import Schedule
from ..simulate_schedule import Term, fullest_moments
from .stage_records import Region

_PARAMETERS = "limits/gap = 0\nlimits/absgap = 0\nnumerics/feastol = 1e-9\n"


class Costs(Protocol):
    """What a variant of a region costs; see ``stages.Variant``."""

    @property
    def forward_s(self) -> float: ...
    @property
    def input_s(self) -> float: ...
    @property
    def weight_s(self) -> float: ...
    @property
    def step_s(self) -> float: ...
    @property
    def state_bytes(self) -> int: ...
    @property
    def saved_bytes(self) -> int: ...
    @property
    def working_bytes(self) -> int: ...


@dataclass(frozen=True)
class Run:
    """Neighbouring regions that are alike.

    Attributes:
        variants: of each of them.
        count: how many there are.
        inner_s: seconds of sending what crosses a cut between two of them.
        outer_s: seconds of sending what crosses a cut behind the last.
    """

    variants: Sequence[Costs]
    count: int
    inner_s: float
    outer_s: float


@dataclass(frozen=True)
class StageAnswer:
    """First region of every stage, variant of every region, and a bound on the makespan of any answer."""

    firsts: tuple[int, ...]
    variants: tuple[int, ...]
    bound_s: float


def group_runs(regions: Sequence[Region]) -> list[Run]:
    """Group neighbours that are alike: how many of them lie on a stage is all that is decided."""
    out: list[Run] = []
    for region in regions:
        last = out[-1] if out else None
        if last is not None and last.variants == region.variants and (last.count == 1 or last.inner_s == last.outer_s):
            inner_s = last.outer_s
            out[-1] = Run(region.variants, last.count + 1, inner_s, region.send_s)
        else:
            out.append(Run(region.variants, 1, 0.0, region.send_s))
    return out


class StageModel:
    """The program; ``add_path`` adds rows, ``solve`` may be called again and again.

    Variables: regions of each run and variant on each stage; for every stage but the last, whether each run has begun
    and whether it is over by the end of that stage, which makes stages contiguous and says where the cut lies.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        schedule: Schedule,
        budget: int | None,
        pinned: Sequence[int],
        *,
        least_bytes: bool = False,
    ) -> None:
        self.runs, self.schedule, self.budget = runs, schedule, budget
        self.least_bytes = least_bytes
        self.unit_s = unit_seconds(runs)
        self.unit_bytes = unit_bytes(runs, schedule)
        self.excess = 0
        self.known: set[tuple[tuple[Term, int], ...]] = set()
        self.model: Any = model_builder.Model()
        self.makespan = self.model.new_num_var(0.0, math.inf, "makespan")
        self.fullest = self.model.new_num_var(0.0, math.inf, "bytes")
        self.counts = [
            [
                [self._count(run.count, f"n{stage},{r},{v}") for v in range(len(run.variants))]
                for r, run in enumerate(runs)
            ]
            for stage in range(schedule.num_stages)
        ]
        self.sends = [self._cut(stage) for stage in range(schedule.num_stages - 1)]
        for stage in range(schedule.num_stages):
            self.model.add(sum(n for run in self.counts[stage] for n in run) >= 1)
        for r, run in enumerate(runs):
            self.model.add(self._so_far(schedule.num_stages - 1, r) == run.count)
        for first in pinned:
            self._pin(first)
        if budget is not None or least_bytes:
            self._bound_bytes()
        self.model.minimize(self.fullest if least_bytes else self.makespan)

    def _count(self, most: int, name: str) -> Any:
        return self.model.new_int_var(0, most, name)

    def _so_far(self, stage: int, run: int) -> Any:
        return sum(n for before in range(stage + 1) for n in self.counts[before][run])

    def _cut(self, stage: int) -> Any:
        """Make stages up to ``stage`` a prefix of the model; return the seconds of the cut behind it."""
        send: Any = 0.0
        over_before: Any = None
        for r, run in enumerate(self.runs):
            begun, over = (self.model.new_bool_var(f"{what}{stage},{r}") for what in ("begun", "over"))
            done = self._so_far(stage, r)
            self.model.add(done >= begun)
            self.model.add(done <= run.count * begun)
            self.model.add(done >= run.count * over)
            self.model.add(done - run.count + 1 <= over)
            if over_before is not None:
                self.model.add(begun <= over_before)
                send = send - self.runs[r - 1].outer_s / self.unit_s * begun
            send = send + run.inner_s / self.unit_s * (begun - over) + run.outer_s / self.unit_s * over
            over_before = over
        return send

    def _pin(self, first: int) -> None:
        """Make some stage end right before region ``first``."""
        total = sum(run.count for run in self.runs)
        chosen = [self.model.new_bool_var(f"pin{first},{stage}") for stage in range(self.schedule.num_stages - 1)]
        self.model.add(sum(chosen) == 1)
        for stage, here in enumerate(chosen):
            done = sum(self._so_far(stage, r) for r in range(len(self.runs)))
            self.model.add(done >= first * here)
            self.model.add(done <= first + (total - first) * (1 - here))

    def _sum(self, stage: int, field: str, unit: float) -> Any:
        return sum(
            getattr(variant, field) / unit * n
            for run, counts in zip(self.runs, self.counts[stage], strict=True)
            for variant, n in zip(run.variants, counts, strict=True)
        )

    def _bound_bytes(self) -> None:
        """Bound every rank at each of its fullest moments; ``fullest`` bounds them all."""
        for rank, moments in enumerate(fullest_moments(self.schedule)):
            stages = self.schedule.stages_of(rank)
            state = sum(self._sum(stage, "state_bytes", self.unit_bytes) for stage in stages)
            working = self._working(stages)
            for moment in moments:
                saved = sum(count * self._sum(stage, "saved_bytes", self.unit_bytes) for stage, count in moment)
                self.model.add(state + saved + working <= self.fullest)

    def _working(self, stages: Sequence[int]) -> Any:
        sizes = {variant.working_bytes for run in self.runs for variant in run.variants}
        if sizes == {0}:
            return 0.0
        working = self.model.new_num_var(0.0, math.inf, "working")
        for stage in stages:
            for run, counts in zip(self.runs, self.counts[stage], strict=True):
                for variant, n in zip(run.variants, counts, strict=True):
                    if variant.working_bytes:
                        used = self.model.new_bool_var("used")
                        self.model.add(n <= run.count * used)
                        self.model.add(working >= variant.working_bytes / self.unit_bytes * used)
        return working

    def add_path(self, path: Mapping[Term, int]) -> bool:
        """Add the lower bound that a path of the schedule gives; tell whether it is new."""
        key = tuple(sorted(path.items()))
        if key in self.known:
            return False
        self.known.add(key)
        total: Any = 0.0
        for (stage, term), count in key:
            if term == "send":
                total = total + count * self.sends[stage]
            else:
                total = total + count * self._sum(stage, f"{term}_s", self.unit_s)
        self.model.add(total <= self.makespan)
        return True

    def tighten(self, excess: int) -> None:
        """Lower the budget by what the solver's tolerance let through."""
        self.excess += excess

    def solve(self, cutoff_s: float) -> StageAnswer | None:
        """Return the best answer with a makespan of at most ``cutoff_s`` by the rows so far; None if there is none."""
        self.makespan.upper_bound = cutoff_s / self.unit_s
        if self.budget is not None:
            self.fullest.upper_bound = (self.budget - self.excess) / self.unit_bytes
            if self.budget < self.excess:
                return None
        solver = self._solver("scip", _PARAMETERS)
        status = solver.solve(self.model)
        if status == model_builder.SolveStatus.INFEASIBLE:
            return None
        if status != model_builder.SolveStatus.OPTIMAL:
            raise AutoparError(
                f"the solver stopped with {status.name} on the cuts of {self.schedule.num_stages} stages"
            )
        return self._read(solver)

    def _solver(self, name: str, parameters: str) -> Any:
        solver: Any = model_builder.Solver(name)
        solver.set_solver_specific_parameters(parameters)
        return solver

    def _read(self, solver: Any) -> StageAnswer:
        firsts: list[int] = []
        variants: list[int] = []
        for stage in range(self.schedule.num_stages):
            firsts.append(len(variants))
            for run in self.counts[stage]:
                for v, n in enumerate(run):
                    variants += [v] * round(solver.value(n))
        if len(variants) != sum(run.count for run in self.runs):
            raise AutoparError("the solver's cuts leave regions out")
        bound = min(float(solver.best_objective_bound), float(solver.objective_value))
        return StageAnswer(tuple(firsts), tuple(variants), bound * self.unit_s)


def unit_seconds(runs: Sequence[Run]) -> float:
    """Return the seconds of one unit of time: the solver's tolerances are absolute."""
    times = [v.forward_s + v.input_s + v.weight_s + v.step_s for run in runs for v in run.variants]
    largest = max(times)
    return 2.0 ** round(math.log2(largest)) if largest > 0 else 1.0


def unit_bytes(runs: Sequence[Run], schedule: Schedule) -> float:
    """Return the bytes of one unit of memory."""
    most = max(v.state_bytes + schedule.num_micro_batches * v.saved_bytes for run in runs for v in run.variants)
    return 2.0 ** math.ceil(math.log2(max(1, most)))
