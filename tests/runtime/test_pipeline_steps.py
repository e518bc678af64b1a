"""The order of a rank's work: messages in their place, what comes once, and what waits for gradients."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from autopar.errors import LoweringError
from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.assign_stages import assign_stages
from autopar.passes.capture import capture
from autopar.passes.complete_plan import complete_plan
from autopar.passes.cut_stages import cut_stages
from autopar.passes.lower import lower
from autopar.passes.micro_batches import micro_batches
from autopar.passes.schedules import make_schedule
from autopar.passes.stage_pieces import BACKWARD, COMPLETE, END, FORWARD, Segment, StagedProgram, Total
from autopar.runtime.pipeline import Stage
from autopar.runtime.pipeline_processes import ProcessEngine
from autopar.runtime.pipeline_random import starts_of_stages
from autopar.runtime.pipeline_steps import DROP, RECEIVE, RUN, SEND, Step, step_order
from tests import models


@cache
def staged(dropout: float = 0.0) -> StagedProgram:
    """Return an MLP in two stages and three micro-batches of two rows."""
    model, args, _ = models.mlp(dropout, batch=6)
    cut = micro_batches(annotate(capture(model, args)), 3, staged=True)
    local = lower(cut, complete_plan(cut, Mesh((1,)), {}, {}), (0,), run=False)
    return cut_stages(local, assign_stages(cut, ["down"]), 2, 3, callable_segments=False)


def test_messages_stand_around_what_they_serve() -> None:
    """1F1B on the second of two ranks: take an activation, run, run back, hand the gradient over, let go."""
    order = step_order(staged(), make_schedule("1f1b", 2, 3), 1, gradients="at once")
    first = [step for step in order.forward if step.micro_batch == 0]
    assert [(step.kind, step.when) for step in first] == [
        (RECEIVE, FORWARD),
        (RUN, FORWARD),
        (DROP, FORWARD),
        (RUN, BACKWARD),
        (SEND, BACKWARD),
        (DROP, BACKWARD),
    ]
    assert order.backward == ()
    assert [step.when for step in order.forward if step.micro_batch < 0][-2:] == [COMPLETE, END]


def test_later_gradients_split_the_work() -> None:
    """Without a loss the forwards run in the call and the backwards in the backward; without gradients nothing else."""
    table = make_schedule("gpipe", 2, 3)
    later = step_order(staged(), table, 0, gradients="later")
    assert {step.when for step in later.forward} & {BACKWARD, END} == set()
    assert {step.when for step in later.backward} & {FORWARD, COMPLETE} == set()
    none = step_order(staged(), table, 0, gradients="none")
    assert none.forward == later.forward and none.backward == ()


def test_a_stage_starts_where_those_before_it_stop_drawing() -> None:
    """The replay leaves the generator as it was, and ends where one device ends."""
    pieces = staged(0.5)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    starts, after = starts_of_stages(pieces, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(starts[0], before)
    torch.empty(6, 32).bernoulli_(0.5)
    assert torch.equal(torch.get_rng_state(), after)


class _Sums:
    """An engine for totals alone."""

    reduce = staticmethod(lambda op, one, other: ProcessEngine.reduce(None, op, one, other))  # type: ignore[arg-type]
    join = staticmethod(lambda parts, dim: torch.cat(parts, dim))


@pytest.mark.parametrize(
    ("op", "expected"),
    [("sum", [3.0, 3.0]), ("max", [2.0, 2.0]), ("min", [0.0, 0.0]), ("same", [0.0, 0.0]), ("join", [0, 0, 1, 1, 2, 2])],
)
def test_totals(op: str, expected: list[float]) -> None:
    """A total takes its share of every micro-batch, in any order, and is whole at the end."""
    pieces = staged()
    stage = Stage(pieces, 0, _Sums(), {})  # type: ignore[arg-type]
    total = Total("whole", "part", "backward", op)
    stage.pieces = type(stage.pieces)(0, totals=(total,))
    for micro_batch in (0, 2, 1):
        stage.loops[micro_batch]["part"] = torch.full((2,), float(micro_batch))
        stage._accumulate(total, micro_batch)
    stage._complete("backward")
    assert stage.value("whole").tolist() == expected


def test_a_value_that_is_not_there() -> None:
    """It is named, with its stage."""
    with pytest.raises(LoweringError, match="stage 1 has no value nothing for micro-batch 2"):
        Stage(staged(), 1, _Sums(), {}).value("nothing", 2)  # type: ignore[arg-type]


def test_what_nobody_reads_is_let_go() -> None:
    """After a forward only what the backward reads is kept, after the backward nothing."""
    stage = Stage(staged(), 0, _Sums(), {})  # type: ignore[arg-type]
    read = stage.pieces.segments[BACKWARD].takes
    stage.loops[1] = dict.fromkeys([*read, "other"])
    stage.drop(FORWARD, 1)
    assert set(stage.loops[1]) == set(read)
    stage.drop(BACKWARD, 1)
    assert stage.loops[1] == {}
    assert (
        Step(DROP, 0, BACKWARD, 1) in step_order(staged(), make_schedule("gpipe", 2, 3), 0, gradients="at once").forward
    )


def test_the_last_segment_of_a_step_leaves_what_is_handed_out() -> None:
    """Sums and gathered copies go while it runs; inputs are the caller's, and outputs and gradients stay."""
    stage = Stage(staged(), 0, _Sums(), {})  # type: ignore[arg-type]
    kept = [*stage.pieces.placeholders, *stage.pieces.ends]
    stage.once = dict.fromkeys([*kept, "gathered copy"])
    stage._let_go(Segment(torch.fx.GraphModule({}, torch.fx.Graph()), (), ()), END, -1)
    assert set(stage.once) == set(kept) and stage.pieces.ends
