"""The passes over lowered programs: the same numbers, the same bytes, in one order on all ranks."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import LoweringError, OptionError
from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.cost.live_bytes import live_bytes
from autopar.passes.improve.check_joint import check_joint
from autopar.passes.improve.improve import NAMES, improve
from autopar.passes.improve.setting import Setting
from autopar.passes.lower import lower, lower_ranks
from autopar.passes.program import Program
from autopar.plans import Plan
from autopar.runtime.simulate import StepResult, simulate_step
from autopar.runtime.verify_ranks import run_original
from tests import models
from tests.rotate import todays
from tests.strategies.graphs import Recipe, recipes
from tests.strategies.plans import meshes, plans, seeded_plan


def moves(result: StepResult) -> Counter[tuple[str, int, str, str, int]]:
    """Return what moved, collectives that ran as one taken apart."""
    return Counter((m.kind, m.axis, m.tensor, m.phase, m.bytes) for m in result.moved)


def assert_alike(model: torch.nn.Module, program: Program, plan: Plan, args: tuple, kwargs: dict | None = None) -> None:  # type: ignore[type-arg]
    """Assert that the improved program computes the same bits and moves the same bytes as the one without passes."""
    values = run_original(model, program, args, kwargs or {}, 0).values
    found = []
    for improved in (False, True):
        programs = lower_ranks(program, plan, run=False, improved=improved)
        for local in programs:
            check_joint(local.joint)
        sequences = {tuple((n.name, str(n.target)) for n in local.joint.graph.nodes) for local in programs}
        assert len(sequences) == 1, "ranks run different sequences"
        torch.manual_seed(0)
        found.append(simulate_step(programs, values))
    plain, better = found
    assert moves(plain) == moves(better)
    for one, other in zip(plain.values, better.values, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one.nan_to_num(), other.nan_to_num())


@settings(max_examples=max(5, settings.default.max_examples // 8))
@given(recipes(), meshes(), st.data())
def test_any_plan_computes_the_same_bits(recipe: Recipe, mesh: Mesh, data: st.DataObject) -> None:
    """Nothing here reorders a sum: outputs, gradients and buffers are the same bits, whatever the plan."""
    model, args = recipe.build()
    program = annotate(capture(model, args))
    assert_alike(model, program, data.draw(plans(program, mesh)), args)


@pytest.mark.parametrize(("name", "sizes"), todays([("gpt2", (3,)), ("llama", (2, 2))], lambda case: "any"))
def test_real_models_compute_the_same_bits(name: str, sizes: tuple[int, ...]) -> None:
    """Real models under a plan that a seed decides; pieces are unequal over three ranks."""
    model, args, kwargs = getattr(models, name)()
    program = annotate(capture(model, args, kwargs))
    assert_alike(model, program, seeded_plan(program, Mesh(sizes), len(name)), args, kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_each_pass_alone_leaves_a_sound_program(name: str) -> None:
    """The verifier runs after each pass, on the graphs of all ranks; a pass that is disabled does not run."""
    model, args, kwargs = models.gpt2()
    program = annotate(capture(model, args, kwargs))
    plan = seeded_plan(program, Mesh((3,)), 1)
    joints = [local.joint for local in lower_ranks(program, plan, run=False, improved=False)]
    before = [(node.name, node.target) for node in joints[0].graph.nodes]
    seen: list[str] = []

    def watch(ran: str, joint: torch.fx.GraphModule) -> None:
        seen.append(ran)
        check_joint(joint)

    others = set(NAMES) - {name}
    improve(joints, Setting(plan.mesh, program.inputs, program.outputs), others, watch)
    assert seen == [name] * 3
    changed = [(node.name, node.target) for node in joints[0].graph.nodes] != before
    assert changed or name in ("merge_equal", "drop_unused", "join_axes")  # those have tests of their own


def test_an_unknown_pass_is_refused() -> None:
    """A name that is none is named, with those that there are."""
    with pytest.raises(OptionError, match=r"names no pass by 'overlap'; there are merge_equal, drop_unused, join_axes"):
        improve([], Setting(Mesh((1,)), (), ()), ["overlap"])


def test_a_plan_names_the_passes_that_are_left_out() -> None:
    """With all of them disabled a plan's program is the one without passes."""
    model, args, kwargs = models.mlp()
    program = annotate(capture(model, args, kwargs))
    plan = seeded_plan(program, Mesh((2,)), 2)
    off = msgspec.structs.replace(plan, options=msgspec.structs.replace(plan.options, disable=NAMES))
    graphs = [
        [node.format_node() for node in lower(program, p, (0,), improved=improved).joint.graph.nodes]
        for p, improved in ((plan, True), (plan, False), (off, True))
    ]
    assert graphs[0] != graphs[1] == graphs[2]


@pytest.mark.parametrize("seed", range(2))
def test_a_budget_is_not_exceeded(seed: int) -> None:
    """With a budget below what the program takes, what is alive at once does not grow."""
    model, args, kwargs = models.gpt2()
    program = annotate(capture(model, args, kwargs))
    plan = seeded_plan(program, Mesh((2, 2)), seed)
    before = live_bytes(lower(program, plan, (0, 0), run=False, improved=False)).peak_bytes
    tight = msgspec.structs.replace(plan, options=msgspec.structs.replace(plan.options, memory=before // 2))
    local = lower(program, tight, (0, 0), run=False)
    assert live_bytes(local).peak_bytes <= before


def test_the_verifier_sees_faults() -> None:
    """A value that is read before it is there, and a collective that nobody waits for."""
    model, args, kwargs = models.mlp()
    program = annotate(capture(model, args, kwargs))
    plan = seeded_plan(program, Mesh((2,)), 2)
    joint = lower(program, plan, (0,), run=False).joint
    wait = next(node for node in joint.graph.nodes if "wait_tensor" in str(node.target))
    wait.replace_all_uses_with(wait.args[0])
    joint.graph.erase_node(wait)
    with pytest.raises(LoweringError, match="must be read by one wait"):
        check_joint(joint)
