"""What one rank runs of a program that is cut into stages and micro-batches: segments, messages, totals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .program import Input, Output

BEGIN, FORWARD, COMPLETE, TURN, BACKWARD, END = "begin", "forward", "complete", "turn", "backward", "end"
WEIGHT = "weight"

WHEN: tuple[str, ...] = (BEGIN, FORWARD, COMPLETE, TURN, BACKWARD, END)
"""When a node runs: before the micro-batches; forward of each; when all forwards are done; before the backwards;
backward of each; when all backwards are done."""

EACH = (FORWARD, BACKWARD, WEIGHT)
"""The parts that run once a micro-batch; the others run once a step."""

ADDING: dict[str, str] = {BACKWARD: "backward, adding", WEIGHT: "weight, adding"}
"""A part that gives to sums -> its other form, which runs from the second micro-batch on (``add_to_sums``)."""


@dataclass
class Segment:
    """A graph that one stage runs at one time.

    Attributes:
        graph_module: takes ``takes`` and returns the tuple of ``gives``.
        takes, gives: names of values.
    """

    graph_module: fx.GraphModule
    takes: tuple[str, ...]
    gives: tuple[str, ...]


@dataclass(frozen=True)
class Total:
    """A value that is whole when all micro-batches have given their part.

    Attributes:
        name: of the whole.
        part: what a micro-batch gives.
        when: ``forward`` or ``backward``: the loop that gives the parts.
        op: ``sum``, ``max``, ``min``, ``product``, ``same`` (the first is the whole), or ``join``.
        dim: along which ``join`` puts the parts side by side.
    """

    name: str
    part: str
    when: str
    op: str
    dim: int = 0


@dataclass(frozen=True)
class Draw:
    """A random op of the forward, for stages that must know how many numbers those before them draw.

    Attributes:
        stage: that runs it.
        target, args, kwargs: the op; ``None`` stands for the number of the micro-batch.
    """

    stage: int
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class StagePieces:
    """One stage of one rank.

    Attributes:
        index: its number.
        segments: when -> the graph; ``weight`` beside ``backward`` where the backward comes in two parts; those that
            give to sums in a second form too, by the names of ``ADDING``.
        totals: what this stage accumulates.
        down: when -> values that it takes from the stage before it.
        up: when -> values that it takes from the stage after it.
        placeholders: names of the program's inputs that it reads (``micro_batch`` among them).
        owns: placeholders of the parameters that it keeps and updates.
        ends: outputs and gradients of the program that it has at the end of a step.
    """

    index: int
    segments: dict[str, Segment] = field(default_factory=dict)
    totals: tuple[Total, ...] = ()
    down: dict[str, tuple[str, ...]] = field(default_factory=dict)
    up: dict[str, tuple[str, ...]] = field(default_factory=dict)
    placeholders: tuple[str, ...] = ()
    owns: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()


@dataclass
class StagedProgram:
    """A lowered program of one rank's place, cut into stages.

    Attributes:
        stages: in model order.
        inputs, outputs: the roles of the whole program.
        output_stage: one an element of ``outputs``: the stage that has it; None for constants.
        num_micro_batches: how many there are.
        barrier: no backward may start before all forwards are done: it needs a total of the forward.
        draws: the random ops, in program order.
        travelling: value name -> a meta tensor of its local shape, for every value that goes from stage to stage.
    """

    stages: tuple[StagePieces, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    output_stage: tuple[int | None, ...]
    num_micro_batches: int
    barrier: bool
    draws: tuple[Draw, ...]
    travelling: dict[str, torch.Tensor]

    def sent_down(self, stage: int, when: str) -> tuple[str, ...]:
        """Return what a stage hands to the next one."""
        return self.stages[stage + 1].down.get(when, ()) if stage + 1 < len(self.stages) else ()

    def sent_up(self, stage: int, when: str) -> tuple[str, ...]:
        """Return what a stage hands to the one before it."""
        return self.stages[stage - 1].up.get(when, ()) if stage else ()
