"""The memory table of a plan after lowering."""

from __future__ import annotations

from autopar.mesh import Mesh
from autopar.passes.cost.live_bytes import live_bytes
from autopar.passes.lower import lower
from autopar.passes.pipeline import make_plan
from autopar.passes.predict_memory import predict_memory
from autopar.plans import Options
from tests.passes.tiny_program import tiny_program


def test_the_table_is_the_walk_of_the_first_rank() -> None:
    """Peak, temporaries and the largest gather are those of the lowered program; what the solver counted stays."""
    program = tiny_program(rows=6, width=5, out=8)
    plan = make_plan(program, Mesh((2,), device="cpu"), Options(optimizer="momentum", memory=10_000))
    found = live_bytes(lower(program, plan, (0,), run=False), "momentum")
    memory = plan.memory
    assert (memory.peak_bytes, memory.peak_at) == (found.peak_bytes, found.at)
    assert memory.temporaries_bytes == found.parts["temporaries"]
    assert memory.gather_bytes == found.largest_gather_bytes
    kept = [memory.parameters_bytes, memory.gradients_bytes, memory.optimizer_bytes]
    assert memory.total_bytes == sum(kept) + memory.buffers_bytes + memory.saved_bytes
    assert predict_memory(program, plan) == plan


def test_the_report_prints_it() -> None:
    """The plan's text shows what is alive at once and where."""
    program = tiny_program()
    plan = make_plan(program, Mesh((2,), device="cpu"))
    assert f"alive at once, at most (at {plan.memory.peak_at})" in str(plan)
