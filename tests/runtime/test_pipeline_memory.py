"""Live bytes of steps in micro-batches and stages: predicted against those of a rank that runs alone."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.pipeline import make_plan
from autopar.passes.pipeline_plan import choose_pipeline, cut_program, make_pipeline_plan
from autopar.plans import Options
from autopar.runtime.pipeline_memory import measure_staged_rank, predict_staged_memory, staged_live_bytes
from tests import models
from tests.captured import values_of

CASES = [
    ("gpt2", Mesh((2,), ("data",), device="cpu"), Options(micro_batches=2, constraints={"*": "batch; zero3"})),
    ("mlp", Mesh((2,), ("pp",), device="cpu"), Options(micro_batches=4)),
    ("llama", Mesh((2, 2), ("pp", "data"), device="cpu"), Options(micro_batches=2, schedule="gpipe")),
]


@pytest.mark.parametrize(("name", "mesh", "options"), CASES)
def test_a_rank_takes_what_is_predicted(name: str, mesh: Mesh, options: Options) -> None:
    """To the byte, on every place of the pipeline, by purpose."""
    model, args, kwargs = getattr(models, name)(dropout=0.0)
    program = annotate(capture(model, args, kwargs))
    record = choose_pipeline(program, mesh, options)
    cut = cut_program(program, record, options.outputs)
    plan = make_pipeline_plan(program, mesh, options, cut=cut)
    values = values_of(program, model, args, kwargs)
    for place in range(record.ranks):
        predicted = staged_live_bytes(cut, plan, place=place)
        measured = measure_staged_rank(cut, plan, values, torch.optim.AdamW, place=place)
        assert (predicted.peak_bytes, predicted.parts) == (measured.peak_bytes, measured.parts)


def test_fewer_micro_batches_in_flight_take_less() -> None:
    """1F1B holds as many micro-batches as there are stages, GPipe all of them."""
    model, args, kwargs = models.gpt2(batch=8)
    program = annotate(capture(model, args, kwargs))
    saved = {}
    for schedule in ("gpipe", "1f1b"):
        mesh, options = Mesh((2,), ("pp",), device="cpu"), Options(micro_batches=8, schedule=schedule, optimizer="sgd")
        cut = cut_program(program, choose_pipeline(program, mesh, options), options.outputs)
        saved[schedule] = staged_live_bytes(cut, make_pipeline_plan(program, mesh, options, cut=cut)).peak_bytes
    assert saved["1f1b"] < saved["gpipe"]


def test_more_micro_batches_take_less() -> None:
    """On one stage each backward follows its forward, so that what is saved falls with the number of micro-batches."""
    model, args, kwargs = models.gpt2(batch=8, length=24)
    program = annotate(capture(model, args, kwargs))
    saved = [
        predict_staged_memory(
            program, make_pipeline_plan(program, Mesh((1,)), Options(micro_batches=count, optimizer="sgd"))
        ).memory.saved_bytes
        for count in (2, 4, 8)
    ]
    assert saved[0] > 1.6 * saved[1] > 1.6 * 1.6 * saved[2]


def test_a_plan_without_micro_batches_is_refused() -> None:
    """It has a prediction of its own."""
    model, args, kwargs = models.mlp()
    program = annotate(capture(model, args, kwargs))
    with pytest.raises(PlanError, match="live_bytes"):
        staged_live_bytes(program, make_plan(program, Mesh((2,))))


def test_the_plan_tells_the_memory_of_its_fullest_rank() -> None:
    """The table is of one rank, not of all stages together; other plans stay as they are."""
    model, args, kwargs = models.gpt2()
    program = annotate(capture(model, args, kwargs))
    mesh, options = Mesh((2,), ("pp",), device="cpu"), Options(micro_batches=4)
    plan = make_pipeline_plan(program, mesh, options)
    memory = predict_staged_memory(program, plan).memory
    cut = cut_program(program, choose_pipeline(program, mesh, options), options.outputs)
    peaks = [staged_live_bytes(cut, plan, place=place).peak_bytes for place in (0, 1)]
    assert memory.peak_bytes == max(peaks)
    assert memory.parameters_bytes < plan.memory.parameters_bytes
    kept = memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes + memory.buffers_bytes
    assert memory.total_bytes == kept + memory.saved_bytes
    plain = make_plan(program, Mesh((2,)))
    assert predict_staged_memory(program, plain) is plain
