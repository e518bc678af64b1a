"""Micro-batches, stages and schedules, all ranks in one process, against the model on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.assign_stages import assign_stages
from autopar.passes.capture import capture
from autopar.passes.cut_stages import cut_stages
from autopar.passes.improve.improve_stages import improve_stages
from autopar.passes.lower import lower
from autopar.passes.micro_batches import micro_batches
from autopar.passes.pipeline import make_plan
from autopar.passes.schedules import make_schedule
from autopar.runtime.simulate_pipeline import simulate_pipeline
from autopar.runtime.verify_ranks import run_original
from tests import models

CASES = [
    ("mlp", (2,), 4, "gpipe", 1, ("down",)),
    ("mlp", (2, 2), 2, "gpipe", 1, ()),
    ("gpt2", (2,), 4, "1f1b", 1, ("transformer.h.1",)),
    ("llama", (2,), 1, "zero_bubble", 1, ("model.layers.1",)),
    ("llama", (2,), 4, "zero_bubble", 2, ("model.layers.0.mlp", "model.layers.1", "model.layers.1.mlp")),
    ("bert", (1,), 4, "interleaved_1f1b", 2, ("bert.encoder.layer.0", "bert.encoder.layer.1", "cls")),
    ("vit", (3,), 2, "1f1b", 1, ("vit.layers.1",)),
    ("t5", (2,), 4, "zbv", 2, ("encoder.block.1", "decoder", "decoder.block.1")),
]


@pytest.mark.parametrize(("name", "sizes", "count", "schedule", "chunks", "cuts"), CASES)
def test_a_pipeline_equals_one_device(
    name: str, sizes: tuple[int, ...], count: int, schedule: str, chunks: int, cuts: tuple[str, ...]
) -> None:
    """Loss and every gradient equal the eager model's, dropout and tied weights among them."""
    model, args, kwargs = models.llama() if name == "llama" else getattr(models, name)(dropout=0.1)
    program = annotate(capture(model, args, kwargs))
    cut = micro_batches(program, count, staged=bool(cuts))
    mesh = Mesh(sizes)
    plan = make_plan(cut, mesh)
    programs = [lower(cut, plan, coordinate, run=False, improved=False) for coordinate in mesh.coordinates()]
    stages, split = assign_stages(cut, cuts), schedule in ("zero_bubble", "zbv")
    staged = [
        cut_stages(p, stages, len(cuts) + 1, count, split_backward=split, callable_segments=False) for p in programs
    ]
    improve_stages(staged, mesh, None)
    table = make_schedule(schedule, (len(cuts) + 1) // chunks, count, chunks)
    reference = run_original(model, program, args, kwargs, 20)
    torch.manual_seed(20)
    result = simulate_pipeline(programs, staged, table, reference.values)
    for role, value in zip(cut.outputs, result.values, strict=True):
        if role.node is None:
            continue
        assert value is not None
        expected: Any = reference.leaves[role.index] if role.kind == "output" else reference.gradients[role.of]
        if expected is None:
            assert not value.any()
        else:
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=2e-5, msg=lambda m, r=role: f"{r.name}: {m}")
