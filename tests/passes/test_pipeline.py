"""From a program to its plan: the same bytes everywhere, expert plans, constraints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.errors import ConstraintError
from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.lower import lower
from autopar.passes.pipeline import make_plan
from autopar.passes.program import Program
from autopar.passes.solve import decide_hiding
from autopar.plans import Options, Plan
from benchmarks.models.llama import LlamaConfig, build
from tests import models
from tests.passes.tiny_program import tiny_program

FAST = Mesh((4,), ("model",), device="h100", links=("nvlink4",))

SCRIPT = """
from autopar.mesh import Mesh
from autopar.passes.capture import capture
from autopar.passes.pipeline import make_plan
from autopar.plan_format import encode_plan
from benchmarks.models.llama import LlamaConfig, build
import hashlib
config = LlamaConfig(hidden=512, ffn=1024, heads=8, kv_heads=4, layers=2, vocab=1000, sequence=256)
plan = make_plan(capture(*build(config, 8), {}), Mesh((2, 2), device="h100", links=("ethernet", "nvlink4")))
print(hashlib.sha256(encode_plan(plan)).hexdigest())
"""


def wide_llama() -> Program:
    """Return one layer that is worth splitting."""
    config = LlamaConfig(hidden=2048, ffn=8192, heads=16, kv_heads=4, layers=1, vocab=8192, sequence=1024)
    return annotate(capture(*build(config, 8), {}))


def test_the_plan_is_the_same_in_another_process_and_under_another_hash_seed() -> None:
    """Two processes, two hash seeds, the same bytes."""
    root = Path(__file__).resolve().parent.parent.parent
    seen = set()
    for seed in ("1", "77"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        run = [sys.executable, "-c", SCRIPT]
        seen.add(subprocess.run(run, env=env, cwd=root, check=True, capture_output=True, text=True).stdout)
    assert len(seen) == 1 and len(seen.pop().strip()) == 64


def test_a_tiny_model_stays_whole_or_data_parallel() -> None:
    """Where a collective costs more than the work, no parameter is split and nothing is gathered."""
    plan = make_plan(capture(*models.mlp()), Mesh((2,), device="h100", links=("nvlink4",)))
    assert set(plan.parameters.values()) == {"R"}
    assert {row.kind for row in plan.collectives} <= {"all_reduce"}


def roles_of(plan: Plan, module: str) -> set[tuple[str, ...]]:
    """Return the roles of the forward products of a module."""
    return {
        plan.roles[node]
        for node, path in plan.modules.items()
        if path == module and "contract" in node and plan.phases[node] == "forward"
    }


class Block(nn.Module):
    """A wide pair of layers around a residual, the loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4096, 16384, bias=False)
        self.down = nn.Linear(16384, 4096, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a scalar."""
        return (x + self.down(torch.relu(self.up(x)))).square().mean()


SLOW_AND_FAST = Mesh((4, 4), ("slow", "fast"), device="h100", links=("infiniband_ndr", "nvlink4"))


def block_program(batch: int) -> Program:
    """Return a block of two products, for ``batch`` sequences of 512 tokens."""
    with torch.device("meta"):
        model, x = Block().bfloat16(), torch.empty(batch, 512, 4096, dtype=torch.bfloat16)
    return capture(model, (x,), {})


def test_many_tokens_hide_the_gathers() -> None:
    """With enough compute to hide it, moving parameters and gradients beats moving activations, which nothing hides."""
    plan = make_plan(block_program(batch=128), SLOW_AND_FAST, Options(overlap=True))
    assert all(role in ("batch", "sequence") for roles in roles_of(plan, "up") for role in roles)
    assert plan.cost.hidden_seconds > plan.cost.exposed_seconds
    parts = plan.cost.compute_seconds + plan.cost.exposed_seconds
    assert plan.cost.step_seconds == pytest.approx(parts)


def test_what_hides_is_hidden_by_default_where_that_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan says which prices it was proved by; without a proof it is the one in which nothing hides."""
    program, mesh = capture(*models.gpt2(width=256, batch=16, length=64)), Mesh((8,), device="h100")
    hidden, shown, either = (make_plan(program, mesh, Options(overlap=overlap)) for overlap in (True, False, None))
    assert hidden.cost.step_seconds < shown.cost.step_seconds and hidden.cost.hidden_seconds > 0
    assert either == hidden and either.options.overlap is True and either.solver.status == "optimal"
    monkeypatch.setattr(decide_hiding, "PROVED", -1.0)
    assert make_plan(program, mesh, Options(overlap=None)) == shown
    slow = make_plan(program, Mesh((2,)), Options(overlap=None))
    assert slow.options.overlap is False and slow == make_plan(program, Mesh((2,)))


def test_experts_plans_come_out_unaided() -> None:
    """On a slow and a fast axis: tokens over the slow one, a column and row pair over the fast one; and when memory is
    tight, parameters rest split over the slow axis too, are gathered at use, and their gradients come back in pieces.
    """
    program, mesh = block_program(batch=128), SLOW_AND_FAST
    free = make_plan(program, mesh)
    tight = make_plan(program, mesh, Options(memory=free.memory.total_bytes * 6 // 10))
    for plan in (free, tight):
        (slow, fast), (slow_again, fast_again) = *roles_of(plan, "up"), *roles_of(plan, "down")
        assert {slow, slow_again} <= {"batch", "sequence"}
        assert (fast, fast_again) == ("column", "row")
    assert all(layout.startswith("R,S") for layout in free.parameters.values())
    assert all(layout[0] == layout[3] == "S" for layout in tight.parameters.values())
    over_slow = {(row.kind, row.phase) for row in tight.collectives if row.axis == 0}
    assert {("all_gather", "forward"), ("reduce_scatter", "backward")} <= over_slow


def test_a_constraint_is_kept() -> None:
    """A module that shall be split by columns is, on the axis asked for, and the plan still lowers."""
    program = wide_llama()
    options = Options(constraints={"layers.*.mlp.up_proj": "column@model", "layers.0.mlp.down_proj": "row"})
    plan = make_plan(program, FAST, options)
    assert roles_of(plan, "layers.0.mlp.up_proj") == {("column",)}
    assert roles_of(plan, "layers.0.mlp.down_proj") == {("row",)}
    lower(program, plan, (1,))


def test_a_parameter_rests_where_it_is_told() -> None:
    """A layout binds a parameter; ``replicate`` binds the ops that read it."""
    program = wide_llama()
    plan = make_plan(program, FAST, Options(constraints={"layers.0.attention.q_proj.weight": "S1"}))
    assert plan.parameters["layers.0.attention.q_proj.weight"] == "S1"
    whole = make_plan(program, FAST, Options(constraints={"layers.*.attention.q_proj": "replicate"}))
    assert roles_of(whole, "layers.0.attention.q_proj") == {("",)}


@pytest.mark.parametrize(
    ("constraints", "words"),
    [
        ({"no.such.module": "column"}, ["no.such.module", "modules are", "up"]),
        ({"up": "expert"}, ["expert", "can be split by", "column"]),
        ({"up": "column@nowhere"}, ["unknown axis", "axis0"]),
        ({"up.bias": "S0"}, ["matches no parameter", "up.weight"]),
        ({"up.weight": "S0,S1"}, ["each of the 1 axes"]),
        ({"up.weight": "S0", "up*": "S1"}, ["can't be met by up.weight"]),
        ({"up.weight": "S2"}, ["splits dim 2 of up.weight", "has 2 dims"]),
    ],
)
def test_a_bad_constraint_is_refused(constraints: dict[str, str], words: list[str]) -> None:
    """The message says what was asked, what there is, and what can be done."""
    with pytest.raises(ConstraintError) as refused:
        make_plan(tiny_program(out=8), Mesh((2,)), Options(constraints=constraints))
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_a_pinned_parameter_stays() -> None:
    """A second input shape is planned with parameters where they lie; an impossible place is refused."""
    program = tiny_program(out=8)
    plan = make_plan(program, Mesh((2,)), Options(pinned={"up.weight": "S1"}))
    assert plan.parameters == {"up.weight": "S1"}
    with pytest.raises(ConstraintError, match="pinned to S5"):
        make_plan(program, Mesh((2,)), Options(pinned={"up.weight": "S5"}))


def test_local_inputs_rest_split_over_the_first_axis() -> None:
    """Each rank passes its share of the batch; a batch that does not divide is refused with what to do."""
    plan = make_plan(tiny_program(out=8), Mesh((2,)), Options(inputs="local"))
    assert plan.inputs == {"args[0]": "S0"}
    with pytest.raises(ConstraintError, match="does not divide"):
        make_plan(tiny_program(rows=7), Mesh((2,)), Options(inputs="local"))
