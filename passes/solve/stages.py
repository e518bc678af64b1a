"""Stage cuts: regions in model order to contiguous stages, by an integer program that takes the schedule's own paths.

The makespan of a schedule is the longest path through its table. Every path is a linear lower bound on the makespan,
whatever the stages cost. So the program starts with the paths through the busiest moments of every rank, its answer is
simulated, the longest path of the simulation becomes a new row, and so on until the simulated makespan is the program's
own bound: then it is the optimum over all cuts and variants (Benders decomposition).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import AutoparError, InfeasibleError, OptionError
from autopar.report.text import exact_bytes

from ..schedules import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Schedule
from ..simulate_schedule import Simulation, StageCost, Term, peak_bytes, simulate_schedule
from .fill_memory import fill_memory
from .stage_bounds import Bounds
from .stage_model import StageModel, group_runs
from .stage_records import Region, stage_costs

EXACT = 1e-9
"""Relative gap at which an answer counts as proved."""


@dataclass(frozen=True)
class Placement:
    """Regions on stages.

    Attributes:
        schedule: the table.
        firsts: the first region of every stage.
        variants: the chosen variant of every region.
        costs: of every stage.
        simulation: of the schedule with these costs.
        bound_s: no placement has a smaller makespan.
        rounds: programs solved.
    """

    schedule: Schedule
    firsts: tuple[int, ...]
    variants: tuple[int, ...]
    costs: tuple[StageCost, ...]
    simulation: Simulation
    bound_s: float
    rounds: int

    @property
    def makespan_s(self) -> float:
        """Seconds of a step."""
        return self.simulation.makespan_s

    @property
    def gap(self) -> float:
        """Relative distance of the bound."""
        return max(0.0, self.makespan_s - self.bound_s) / self.makespan_s if self.makespan_s else 0.0


def quick_stages(
    regions: Sequence[Region],
    schedule: Schedule,
    budget: int | None = None,
    *,
    pinned: Sequence[int] = (),
    bounds: Bounds | None = None,
) -> Placement | None:
    """Return a good placement at once, with a bound; None when it found none that fits (there may be one).

    Args and errors: as ``place_stages``; ``bounds`` are of the same problem, where they have been made.
    """
    _check(regions, schedule, pinned)
    bounds = bounds or Bounds(regions, schedule, budget, pinned)
    bound_s = bounds.bound_s()
    best: Placement | None = None
    for firsts, variants in bounds.placements():
        if budget is not None:
            variants = fill_memory(regions, schedule, budget, firsts, variants) or variants
        found = (firsts, variants)
        costs = stage_costs(regions, *found)
        simulation = simulate_schedule(schedule, costs)
        if best is None or simulation.makespan_s < best.makespan_s:
            best = Placement(schedule, *found, costs, simulation, min(bound_s, simulation.makespan_s), 0)
    return best


def place_stages(
    regions: Sequence[Region],
    schedule: Schedule,
    budget: int | None = None,
    *,
    pinned: Sequence[int] = (),
    cutoff_s: float = math.inf,
    tolerance: float = EXACT,
    max_rounds: int = 200,
) -> Placement | None:
    """Return the placement with the least makespan; None when none is faster than ``cutoff_s``.

    Args:
        regions: in model order.
        schedule: its stages get at least one region each.
        budget: bytes of a rank.
        pinned: regions that begin a stage.
        cutoff_s: a makespan that is already had.
        tolerance: relative gap at which to stop.
        max_rounds: programs solved at most; then the best is returned with its gap.

    Raises:
        OptionError: more stages than regions, or a pinned region that can't begin a stage.
        InfeasibleError: no placement fits the budget; it names the least that has one.
    """
    best = quick_stages(regions, schedule, budget, pinned=pinned)
    bound_s = best.bound_s if best is not None else 0.0
    if best is not None and best.makespan_s >= cutoff_s:
        best = None
    model = StageModel(group_runs(regions), schedule, budget, pinned)
    for path in first_paths(schedule):
        model.add_path(path)
    rounds = 0
    while best is None or best.makespan_s - bound_s > tolerance * best.makespan_s:
        if rounds == max_rounds:
            break
        rounds += 1
        answer = model.solve(min(cutoff_s, best.makespan_s if best else math.inf))
        if answer is None:
            if best is None and math.isinf(cutoff_s):
                raise _too_small(regions, schedule, budget, pinned)
            bound_s = best.makespan_s if best else cutoff_s
            break
        bound_s = max(bound_s, answer.bound_s)
        costs = stage_costs(regions, answer.firsts, answer.variants)
        if budget is not None and (excess := max(peak_bytes(schedule, costs)) - budget) > 0:
            model.tighten(excess)
            continue
        simulation = simulate_schedule(schedule, costs)
        if simulation.makespan_s < min(cutoff_s, best.makespan_s if best else math.inf):
            best = Placement(schedule, answer.firsts, answer.variants, costs, simulation, bound_s, rounds)
        if not model.add_path(simulation.path):
            break
    return _closed(best, bound_s, rounds)


def _closed(best: Placement | None, bound_s: float, rounds: int) -> Placement | None:
    if best is None:
        return None
    at = (best.schedule, best.firsts, best.variants, best.costs, best.simulation)
    return Placement(*at, min(bound_s, best.makespan_s), rounds)


def _check(regions: Sequence[Region], schedule: Schedule, pinned: Sequence[int]) -> None:
    if schedule.num_stages > len(regions):
        raise OptionError(
            f"{schedule.num_stages} stages need at least as many regions, but the model has {len(regions)} "
            f"({', '.join(region.name for region in regions[:4])}, ...); use fewer stages"
        )
    if len(pinned) >= schedule.num_stages:
        raise OptionError(f"{len(pinned)} cuts are pinned, which makes more than {schedule.num_stages} stages")
    for first in pinned:
        if not 0 < first < len(regions):
            raise OptionError(
                f"no stage can begin at region {first}: a cut lies between two of the {len(regions)} regions"
            )


def first_paths(schedule: Schedule) -> list[Mapping[Term, int]]:
    """Return a path for every rank: to its first action, through all of its actions, and back to the first stage.

    The way back counts only when the rank's last action is a backward that others wait for.
    """
    out: list[Mapping[Term, int]] = []
    for rank, row in enumerate(schedule.actions):
        path: dict[Term, int] = {}
        first, last = row[0].stage, row[-1]
        for stage in range(first):
            _count(path, (stage, "forward"))
            _send(schedule, path, stage)
        for action in row:
            if action.kind == FORWARD:
                _count(path, (action.stage, "forward"))
            if action.kind in (BACKWARD, BACKWARD_INPUT):
                _count(path, (action.stage, "input"))
            if action.kind in (BACKWARD, BACKWARD_WEIGHT):
                _count(path, (action.stage, "weight"))
        home = rank
        if last.kind in (BACKWARD, BACKWARD_INPUT):
            for stage in reversed(range(last.stage)):
                _send(schedule, path, stage)
                _count(path, (stage, "input"))
                if last.kind == BACKWARD:
                    _count(path, (stage, "weight"))
            home = schedule.rank_of(0) if last.stage else rank
        for stage in schedule.stages_of(home):
            _count(path, (stage, "step"))
        out.append(path)
    return out


def _count(path: dict[Term, int], term: Term) -> None:
    path[term] = path.get(term, 0) + 1


def _send(schedule: Schedule, path: dict[Term, int], stage: int) -> None:
    if schedule.rank_of(stage) != schedule.rank_of(stage + 1):
        _count(path, (stage, "send"))


def _too_small(
    regions: Sequence[Region], schedule: Schedule, budget: int | None, pinned: Sequence[int]
) -> InfeasibleError:
    model = StageModel(group_runs(regions), schedule, None, list(pinned), least_bytes=True)
    answer = model.solve(math.inf)
    if answer is None:
        raise AutoparError(f"the least memory of {schedule.num_stages} stages could not be found")
    least = max(peak_bytes(schedule, stage_costs(regions, answer.firsts, answer.variants)))
    return InfeasibleError(
        f"no cut into {schedule.num_stages} stages fits into {exact_bytes(budget or 0)} a rank with "
        f"{schedule.num_micro_batches} micro-batches and {schedule.name}; the least that has one is "
        f"{exact_bytes(least)}: raise memory= to that, or use more ranks, smaller micro-batches, or a "
        "schedule that keeps fewer of them",
        least,
    )
