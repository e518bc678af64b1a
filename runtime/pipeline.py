"""Runs one stage's segments: what every micro-batch and the step hold, what is accumulated, what travels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from autopar.errors import LoweringError
from autopar.passes.micro_batches import INDEX
from autopar.passes.stage_pieces import (
    ADDING,
    BACKWARD,
    COMPLETE,
    EACH,
    END,
    FORWARD,
    WEIGHT,
    Segment,
    StagedProgram,
    StagePieces,
    Total,
)

from .pipeline_steps import DOWN, DROP, RECEIVE, RUN, SEND, Step

Value = Any
"""A tensor, or, in a simulation, one tensor a rank of the stage."""


class Engine(Protocol):
    """Who computes: on real tensors of this process, or on those of all simulated ranks of a stage."""

    def run(self, stage: int, when: str, arguments: list[Value]) -> list[Value]:
        """Run a segment; the list is emptied."""

    def reduce(self, op: str, one: Value, other: Value) -> Value:
        """Return the sum, maximum, ... of two values of one shape."""

    def join(self, parts: list[Value], dim: int) -> Value:
        """Return values side by side along a dim."""

    def number(self, micro_batch: int) -> Value:
        """Return the number of a micro-batch as a program reads it."""

    def enter_forward(self, stage: int) -> None:
        """Set the generator to where the numbers of a stage's forward start."""


class Post(Protocol):
    """Who carries messages between stages."""

    def send(self, step: Step, values: list[Value]) -> None:
        """Hand values over; never waits."""

    def receive(self, step: Step, names: Sequence[str]) -> list[Value] | None:
        """Return what the neighbour sent for a step; None when it isn't there yet."""


class Stage:
    """One stage in one step.

    Args:
        staged: the program.
        index: the stage.
        engine: computes.
        values: placeholder name -> value, for the stage's placeholders.
    """

    def __init__(self, staged: StagedProgram, index: int, engine: Engine, values: Mapping[str, Value]) -> None:
        self.staged, self.pieces, self.engine = staged, staged.stages[index], engine
        self.once: dict[str, Value] = dict(values)
        self.loops: list[dict[str, Value]] = [{} for _ in range(staged.num_micro_batches)]
        self.sums: dict[str, Value] = {}
        self.joins: dict[str, dict[int, Value]] = {}
        self.totals_at = _totals_at(self.pieces)

    def value(self, name: str, micro_batch: int = -1) -> Value:
        """Return a value by its name."""
        if name == INDEX:
            return self.engine.number(max(micro_batch, 0))
        if micro_batch >= 0 and name in self.loops[micro_batch]:
            return self.loops[micro_batch][name]
        if name not in self.once:
            raise LoweringError(f"stage {self.pieces.index} has no value {name} for micro-batch {micro_batch}")
        return self.once[name]

    def run(self, when: str, micro_batch: int) -> None:
        """Run a segment, and accumulate what it gives to totals."""
        if when in (COMPLETE, END):
            self._complete(FORWARD if when == COMPLETE else BACKWARD)
        form = self._form(when)
        segment = self.pieces.segments.get(form)
        added: set[str] = set()
        if segment is not None:
            if when == FORWARD:
                self.engine.enter_forward(self.pieces.index)
            added = self.sums.keys() & set(segment.takes)
            arguments = [
                self.sums.pop(name) if name in added else self.value(name, micro_batch) for name in segment.takes
            ]
            self._let_go(segment, when, micro_batch)
            given = self.engine.run(self.pieces.index, form, arguments)
            home = self.loops[micro_batch] if when in EACH else self.once
            for name, value in zip(segment.gives, given, strict=True):
                (self.sums if name in added else home)[name] = value
        for total in self.totals_at.get(when, ()):
            if total.name not in added:
                self._accumulate(total, micro_batch)

    def _form(self, when: str) -> str:
        """Return in which form a segment runs: the one that adds to sums as soon as there are any."""
        adding = self.pieces.segments.get(ADDING.get(when, ""))
        return when if adding is None or self.sums.keys().isdisjoint(adding.takes) else ADDING[when]

    def put(self, when: str, micro_batch: int, names: Sequence[str], values: list[Value]) -> None:
        """Take a message in."""
        home = self.loops[micro_batch] if when in EACH else self.once
        home.update(zip(names, values, strict=True))

    def drop(self, when: str, micro_batch: int) -> None:
        """Let go of what no later step of a micro-batch reads."""
        kept = self._read_after(when)
        loop = self.loops[micro_batch]
        self.loops[micro_batch] = {name: value for name, value in loop.items() if name in kept}

    def _read_after(self, when: str) -> set[str]:
        later = {FORWARD: (BACKWARD, WEIGHT), BACKWARD: (WEIGHT,)}.get(when, ())
        names = {name for part in later if part in self.pieces.segments for name in self.pieces.segments[part].takes}
        for part in later:
            names.update(self.staged.sent_up(self.pieces.index, part))
            names.update(total.part for total in self.totals_at.get(part, ()))
        return names

    def _let_go(self, segment: Segment, when: str, micro_batch: int) -> None:
        """Forget arguments that only this segment reads, so that the graph frees them at their last use.

        The last segment of a step leaves its inputs, which are the caller's, and what is handed out or on.
        """
        if when == END:
            kept = {*self.pieces.placeholders, *self.pieces.ends, *self.staged.sent_up(self.pieces.index, END)}
            self.once = {name: value for name, value in self.once.items() if name in kept}
        if when not in EACH:
            return
        index = self.pieces.index
        kept = self._read_after(when) | {total.part for total in self.totals_at.get(when, ())}
        kept.update(self.staged.sent_down(index, when) if when == FORWARD else self.staged.sent_up(index, when))
        for name in segment.takes:
            if name not in kept:
                self.loops[micro_batch].pop(name, None)

    def _accumulate(self, total: Total, micro_batch: int) -> None:
        part = self.value(total.part, micro_batch)
        if total.op == "join":
            self.joins.setdefault(total.name, {})[micro_batch] = part
        elif total.name in self.sums and total.op != "same":
            self.sums[total.name] = self.engine.reduce(total.op, self.sums[total.name], part)
        else:
            self.sums.setdefault(total.name, part)

    def _complete(self, when: str) -> None:
        for total in self.pieces.totals:
            if total.when != when:
                continue
            if total.op == "join":
                parts = self.joins.pop(total.name)
                self.once[total.name] = self.engine.join([parts[index] for index in sorted(parts)], total.dim)
            else:
                self.once[total.name] = self.sums.pop(total.name)


def _totals_at(pieces: StagePieces) -> dict[str, list[Total]]:
    """Return the part of a micro-batch's work after which each total takes its share."""
    out: dict[str, list[Total]] = {}
    for total in pieces.totals:
        late = WEIGHT if WEIGHT in pieces.segments else BACKWARD
        last = FORWARD if total.when == FORWARD else late
        giver = next((when for when in EACH if total.part in _gives(pieces, when)), last)
        out.setdefault(giver, []).append(total)
    return out


def _gives(pieces: StagePieces, when: str) -> tuple[str, ...]:
    segment = pieces.segments.get(when)
    return segment.gives if segment is not None else ()


def take_step(step: Step, stages: Mapping[int, Stage], post: Post) -> bool:
    """Do one thing; False when it waits for a message that is not there yet."""
    stage = stages[step.stage]
    if step.kind == RUN:
        stage.run(step.when, step.micro_batch)
    elif step.kind == DROP:
        stage.drop(step.when, step.micro_batch)
    elif step.kind == SEND:
        sent = stage.staged.sent_down if step.direction == DOWN else stage.staged.sent_up
        names = sent(step.stage, step.when)
        post.send(step, [stage.value(name, step.micro_batch) for name in names])
    elif step.kind == RECEIVE:
        side = stage.pieces.down if step.direction == DOWN else stage.pieces.up
        values = post.receive(step, side[step.when])
        if values is None:
            return False
        stage.put(step.when, step.micro_batch, side[step.when], values)
    return True
