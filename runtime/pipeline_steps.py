"""The order of work of one rank of a pipeline: a schedule's table with messages, and what runs before and after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.errors import OptionError
from autopar.passes.schedules import Action, Schedule
from autopar.passes.stage_pieces import BACKWARD, BEGIN, COMPLETE, END, FORWARD, TURN, WEIGHT, StagedProgram

RECEIVE, RUN, SEND, DROP = "receive", "run", "send", "drop"
DOWN, UP = "down", "up"

_PARTS = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD, "W": WEIGHT}


@dataclass(frozen=True)
class Step:
    """One thing that a rank does.

    Attributes:
        kind: ``receive``, ``run``, ``send``, or ``drop`` (let go of what nobody reads any more).
        stage: of this rank.
        when: one of ``stage_pieces.WHEN`` or ``weight``.
        micro_batch: its number; -1 for what is done once.
        direction: of a message: ``down`` to later stages, ``up`` to earlier ones.
    """

    kind: str
    stage: int
    when: str
    micro_batch: int = -1
    direction: str = ""


@dataclass(frozen=True)
class StepOrder:
    """What a rank does in a call. Without a loss the second part waits for the gradients of the outputs.

    Attributes:
        forward: up to the outputs; with a loss all of it.
        backward: the rest.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]


def step_order(staged: StagedProgram, schedule: Schedule, rank: int, *, gradients: str) -> StepOrder:
    """Return what a rank of the pipeline axis does.

    Args:
        schedule: the table; its backward actions are left out without gradients.
        gradients: ``"none"``, ``"at once"`` (a loss: the whole schedule runs in the forward) or ``"later"``.

    Raises:
        OptionError: the backward can't start before all forwards are done, and the schedule would.
    """
    mine = schedule.stages_of(rank)
    actions = list(schedule.actions[rank])
    forwards = [action for action in actions if action.kind == "F"]
    backwards = [action for action in actions if action.kind != "F"]
    split = any(action.kind == "W" for action in actions)
    begin = [step for stage in mine for step in _once(staged, stage, BEGIN, DOWN)]
    complete = [step for stage in mine for step in _once(staged, stage, COMPLETE, DOWN)]
    turn = [step for stage in reversed(mine) for step in _once(staged, stage, TURN, UP)]
    end = [step for stage in reversed(mine) for step in _once(staged, stage, END, UP)]
    first = [step for action in forwards for step in _each(staged, action, split)]
    second = [step for action in backwards for step in _each(staged, action, split)]
    if gradients == "none":
        return StepOrder((*begin, *first, *complete), ())
    if staged.barrier or gradients == "later":
        if gradients != "later" and schedule.name != "gpipe":
            raise OptionError(
                f"the schedule {schedule.name} starts backwards before all forwards are done, but this model's "
                "backward needs a total over the whole batch (an auxiliary loss, say); use schedule='gpipe'"
            )
        head, tail = (*begin, *first, *complete), (*turn, *second, *end)
        return StepOrder(head, tail) if gradients == "later" else StepOrder((*head, *tail), ())
    if schedule.num_ranks == 1:
        actions.sort(key=lambda action: action.micro_batch)  # nobody waits: each backward frees what its forward saved
    both = [step for action in actions for step in _each(staged, action, split)]
    return StepOrder((*begin, *turn, *both, *complete, *end), ())


def _once(staged: StagedProgram, stage: int, when: str, direction: str) -> Iterator[Step]:
    yield from _receive(staged, stage, when, -1, direction)
    yield Step(RUN, stage, when)
    yield from _send(staged, stage, when, -1, direction)


def _each(staged: StagedProgram, action: Action, split: bool) -> Iterator[Step]:
    when, direction = _PARTS[action.kind], DOWN if action.kind == "F" else UP
    if when != WEIGHT:
        yield from _receive(staged, action.stage, when, action.micro_batch, direction)
    yield Step(RUN, action.stage, when, action.micro_batch)
    if when != WEIGHT:
        yield from _send(staged, action.stage, when, action.micro_batch, direction)
    yield Step(DROP, action.stage, when, action.micro_batch)


def _receive(staged: StagedProgram, stage: int, when: str, micro_batch: int, direction: str) -> Iterator[Step]:
    side = staged.stages[stage].down if direction == DOWN else staged.stages[stage].up
    if side.get(when):
        yield Step(RECEIVE, stage, when, micro_batch, direction)


def _send(staged: StagedProgram, stage: int, when: str, micro_batch: int, direction: str) -> Iterator[Step]:
    names = staged.sent_down(stage, when) if direction == DOWN else staged.sent_up(stage, when)
    if names:
        yield Step(SEND, stage, when, micro_batch, direction)


def messages(order: Sequence[Step]) -> list[Step]:
    """Return the sends of an order: whoever receives them takes them in this order."""
    return [step for step in order if step.kind == SEND]
