"""Predicted live bytes of lowered programs: against those measured on a simulated rank, and by hand."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.complete_plan import complete_plan
from autopar.passes.cost.live_bytes import live_bytes
from autopar.passes.cost.walk_graph import last_uses
from autopar.passes.lower import lower
from autopar.passes.pipeline import make_plan
from autopar.passes.program import Program
from autopar.runtime.measure_memory import measure_rank
from tests.captured import values_of
from tests.models import MODELS, Built
from tests.passes.tiny_program import tiny_program
from tests.strategies.graphs import Recipe, recipes
from tests.strategies.plans import seeded_plan

MESHES = (Mesh((2,), device="cpu"), Mesh((3,), device="cpu"), Mesh((2, 2), device="cpu"))


@cache
def captured(name: str) -> tuple[Built, Program]:
    """Return a model of the test set with dropout, and its program."""
    model, args, kwargs = MODELS[name](dropout=0.1)
    return (model, args, kwargs), annotate(capture(model, args, kwargs))


def compare(built: Built, program: Program, plan: Any, rank: int) -> None:
    """Check that the prediction for a rank is what it measures: to the byte, at the same node, by purpose."""
    model, args, kwargs = built
    coordinate = list(plan.mesh.coordinates())[rank % plan.mesh.num_ranks]
    local = lower(program, plan, coordinate, run=False)
    predicted = live_bytes(local, "adamw")
    measured = measure_rank(local, values_of(program, model, args, kwargs), torch.optim.AdamW)
    assert predicted.peak_bytes == measured.peak_bytes
    assert predicted.at == measured.at or "gradients" in predicted.at
    assert predicted.parts == measured.parts


@pytest.mark.parametrize(
    ("name", "mesh", "seed"), [*((name, 0, None) for name in sorted(MODELS)), ("gpt2", 2, 3), ("resnet", 1, 4)]
)
def test_models_take_what_is_predicted(name: str, mesh: int, seed: int | None) -> None:
    """The best plan and one with splits of every kind, on the first rank and on the last."""
    built, program = captured(name)
    plan = make_plan(program, MESHES[mesh]) if seed is None else seeded_plan(program, MESHES[mesh], seed)
    compare(built, program, plan, 0 if seed is None else -1)


@settings(max_examples=8, deadline=None)
@given(recipe=recipes(), mesh=st.sampled_from(MESHES), seed=st.integers(0, 99), rank=st.integers(0, 3))
def test_any_graph_under_any_plan_takes_what_is_predicted(recipe: Recipe, mesh: Mesh, seed: int, rank: int) -> None:
    """Random models under random plans, any rank."""
    model, args = recipe.build()
    program = annotate(capture(model, args, {}))
    compare((model, args, {}), program, seeded_plan(program, mesh, seed), rank)


def test_a_tiny_program_by_hand() -> None:
    """``sum(relu(x @ w.T))`` of 6 x 5 by 7 x 5 in float32: the product of the backward is the highest moment."""
    program = tiny_program(rows=6, width=5, out=7)
    plan = complete_plan(program, Mesh((1,), device="cpu"), {}, {})
    found = live_bytes(lower(program, plan, (0,), run=False), "sgd")
    assert found.parts["parameters"] == 7 * 5 * 4
    assert found.parts["inputs"] == 6 * 5 * 4
    assert found.parts["outputs"] == 4
    assert found.peak_bytes == sum(found.parts.values())
    assert found.largest_gather_bytes == 0


def test_a_gathered_parameter_is_the_largest_gather() -> None:
    """A weight that rests in pieces is gathered whole, and lies there beside its piece."""
    program = tiny_program(rows=6, width=5, out=8)
    name = next(role.name for role in program.inputs if role.kind == "parameter")
    mesh = Mesh((2,), device="cpu")
    whole = live_bytes(lower(program, complete_plan(program, mesh, {}, {}), (0,), run=False))
    split = live_bytes(lower(program, complete_plan(program, mesh, {}, {name: (0,)}), (0,), run=False))
    assert split.largest_gather_bytes == 8 * 5 * 4
    assert split.parts["parameters"] * 2 == whole.parts["parameters"]


def test_optimizer_state_lies_beside() -> None:
    """The state of the optimizer adds its bytes to every moment."""
    program = tiny_program()
    local = lower(program, complete_plan(program, Mesh((1,), device="cpu"), {}, {}), (0,), run=False)
    plain, adam = live_bytes(local, "sgd"), live_bytes(local, "adamw")
    assert adam.peak_bytes - plain.peak_bytes == adam.parts["optimizer"] == 2 * 7 * 5 * 4 + 4


def test_last_uses() -> None:
    """A value goes after its last reader, one that nobody reads after itself, and results stay."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.relu, (x,))
    z = graph.call_function(torch.add, (x, y))
    unread = graph.call_function(torch.neg, (z,))
    graph.output((z,))
    uses = last_uses(graph)
    assert [uses[node] for node in (x, y, z, unread)] == [[], [], [x, y], [unread]]
