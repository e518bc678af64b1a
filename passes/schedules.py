"""Pipeline schedules: their tables, those of ``torch.distributed.pipelining``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from autopar.errors import AutoparError, OptionError

from .torch_private import pipeline_order

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"

SCHEDULES: tuple[str, ...] = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv")
"""Names of the schedules."""

NAMES: dict[str, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "interleaved 1F1B",
    "zero_bubble": "zero bubble",
    "zbv": "zero bubble (V)",
}
"""What people call them."""

SINGLE = ("gpipe", "1f1b")
"""Schedules with one stage a rank."""

SPLITS_BACKWARD = ("zero_bubble", "zbv")
"""Schedules whose backward comes in two parts: for the inputs, then for the weights."""


@dataclass(frozen=True, order=True, slots=True)
class Action:
    """One piece of work: of a stage, on a micro-batch.

    ``kind`` is ``F`` (forward), ``B`` (the whole backward), ``I`` (its part for the inputs) or ``W`` (for the weights).
    """

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True, eq=False)
class Schedule:
    """A table: what every rank of the pipeline axis does, in order.

    Attributes:
        name: one of ``SCHEDULES``.
        num_ranks: of the pipeline axis.
        num_stages: a multiple of it.
        num_micro_batches: of a step.
        actions: a tuple a rank.
    """

    name: str
    num_ranks: int
    num_stages: int
    num_micro_batches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def _key(self) -> tuple[str, int, int, int, int]:
        return self.name, self.num_ranks, self.num_stages, self.num_micro_batches, len(self.actions[0])

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Schedule) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def chunks(self) -> int:
        """Stages of each rank."""
        return self.num_stages // self.num_ranks

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage: round and round, or down and up again for ``zbv``."""
        return stage_rank(self.name, self.num_ranks, stage)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, in model order."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)

    def __str__(self) -> str:
        return "\n".join(f"{rank}: {' '.join(map(str, row))}" for rank, row in enumerate(self.actions))


def stage_rank(name: str, num_ranks: int, stage: int) -> int:
    """Return the rank that holds ``stage`` under the schedule called ``name``."""
    turn, rank = divmod(stage, num_ranks)
    return num_ranks - 1 - rank if name == "zbv" and turn % 2 else rank


@lru_cache(maxsize=256)
def make_schedule(
    name: str, num_ranks: int, num_micro_batches: int, chunks: int = 1, *, forward_only: bool = False
) -> Schedule:
    """Return the table of a schedule. Fewer micro-batches than stages are allowed: the bubble is then large.

    Torch's tables need micro-batches that fill the pipeline or come in equal rounds. For other numbers the table of
    the next one that it supports is made, and the micro-batches that do not exist are taken out: what is left depends
    on nothing that is gone.

    Args:
        name: one of ``SCHEDULES``.
        num_ranks: of the pipeline axis.
        num_micro_batches: of a step.
        chunks: stages a rank: 1 for GPipe and 1F1B, 2 for ``zbv``.
        forward_only: leave the backward out.

    Raises:
        OptionError: an unknown name, or a number that the schedule can't have.

    >>> print(make_schedule("1f1b", 2, 3))
    0: 0F0 0F1 0B0 0F2 0B1 0B2
    1: 1F0 1B0 1F1 1B1 1F2 1B2
    """
    if name not in SCHEDULES:
        raise OptionError(f"no schedule is called {name!r}; use one of {', '.join(map(repr, SCHEDULES))}")
    for what, value in (("stages", num_ranks), ("micro-batches", num_micro_batches), ("stages a rank", chunks)):
        if value < 1:
            raise OptionError(f"a schedule has at least one of its {what}; got {value}")
    if name in SINGLE and chunks != 1:
        raise OptionError(f"{NAMES[name]} has one stage a rank; got {chunks}: use 'interleaved_1f1b' for more")
    if name == "zbv" and chunks != 2:
        raise OptionError(f"{NAMES[name]} has exactly two stages a rank; got {chunks}")
    made = _supported(name, num_ranks, num_micro_batches)
    rows = tuple(
        tuple(
            Action(*step) for step in row if step[2] < num_micro_batches and not (forward_only and step[1] != FORWARD)
        )
        for row in pipeline_order(name, num_ranks, chunks, made)
    )
    schedule = Schedule(name, num_ranks, num_ranks * chunks, num_micro_batches, rows)
    _check_table(schedule, forward_only)
    return schedule


def _check_table(schedule: Schedule, forward_only: bool) -> None:
    """Assert that every stage does each part of every micro-batch once, on its own rank."""
    parts = (BACKWARD_INPUT, BACKWARD_WEIGHT) if schedule.name in SPLITS_BACKWARD else (BACKWARD,)
    kinds = (FORWARD,) if forward_only else (FORWARD, *parts)
    for rank, row in enumerate(schedule.actions):
        wanted = {
            Action(stage, kind, micro_batch)
            for stage in schedule.stages_of(rank)
            for kind in kinds
            for micro_batch in range(schedule.num_micro_batches)
        }
        if len(row) != len(wanted) or set(row) != wanted:
            raise AutoparError(f"the table of {schedule.name} of this torch release is not complete:\n{schedule}")


def _supported(name: str, num_ranks: int, num_micro_batches: int) -> int:
    """Return the least number of micro-batches, at least that asked for, for which torch has a table."""
    number = num_micro_batches
    if name == "1f1b":
        number = max(number, num_ranks)
    if name in ("interleaved_1f1b", "zero_bubble"):
        while number % max(1, number // num_ranks):
            number += 1
    return number
