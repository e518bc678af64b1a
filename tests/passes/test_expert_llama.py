"""A Llama on a slow and a fast axis gets what experts write by hand, unaided."""

from __future__ import annotations

import pytest

from autopar.mesh import Mesh
from autopar.passes.capture import capture
from autopar.passes.pipeline import make_plan
from autopar.passes.program import Program
from autopar.plans import Options, Plan
from benchmarks.models.llama import LlamaConfig, build

MESH = Mesh((8, 4), ("slow", "fast"), device="h100", links=("infiniband_ndr", "nvlink4"))
PAIRS = {"q_proj": "column", "k_proj": "column", "v_proj": "column", "o_proj": "row"}
PAIRS |= {"gate_proj": "column", "up_proj": "column", "down_proj": "row"}


@pytest.fixture(scope="module")
def program() -> Program:
    """One layer of a 7B-sized Llama, with embedding and head."""
    model, args = build(LlamaConfig(layers=1, sequence=512, heads=16, kv_heads=16, vocab=32000), 96)
    return capture(model, args, {})


def forward_roles(plan: Plan, projection: str) -> set[tuple[str, ...]]:
    """Return what the axes do to the forward product of a projection."""
    return {
        tuple(roles)
        for node, roles in plan.roles.items()
        if plan.modules.get(node, "").endswith(projection) and {"column", "row"} & set(roles)
    }


def test_llama_is_batch_over_slow_and_column_and_row_over_fast(program: Program) -> None:
    """Without a budget parameters are whole over the slow axis; with a tight one large ones rest split over it too."""
    free = make_plan(program, MESH)
    memory = free.memory
    state = memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes
    tight = make_plan(program, MESH, Options(memory=memory.total_bytes - state * 8 // 10, recompute=False))
    for plan in (free, tight):
        for projection, technique in PAIRS.items():
            assert forward_roles(plan, projection) == {("batch", technique)}, projection
    projections = {name: layout for name, layout in free.parameters.items() if "proj" in name}
    assert all(layout.startswith("R,S") for layout in projections.values()), projections
    split = [name for name in projections if tight.parameters[name].count("S") == 2]
    assert any("mlp" in name for name in split), tight.parameters
    moves = {(row.kind, row.phase, row.tensor) for row in tight.collectives if row.axis == 0}
    assert ("reduce_scatter", "backward") in {move[:2] for move in moves}
    for node in (tight.placeholders[name] for name in split):
        assert ("all_gather", "forward", node) in moves
        assert (node in tight.saved) != (("all_gather", "backward", node) in moves), "kept (ZeRO-2) or again (ZeRO-3)"
    assert tight.memory.total_bytes <= memory.total_bytes - state * 8 // 10
