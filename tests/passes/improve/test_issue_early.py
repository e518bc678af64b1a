"""Collectives start before their results are needed."""

from __future__ import annotations

import msgspec

from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.cost.live_bytes import live_bytes
from autopar.passes.improve.issue_early import AHEAD
from autopar.passes.improve.transfers import transfers
from autopar.passes.lower import lower
from autopar.passes.pipeline import make_plan
from autopar.plans import Options, Plan
from tests import models


def gathers(plan: Plan, program: object) -> list[tuple[int, int, int]]:
    """Return start, first use and bytes of every gather of the forward."""
    local = lower(program, plan, (0,), run=False)  # type: ignore[arg-type]
    position = {node: index for index, node in enumerate(local.joint.graph.nodes)}
    found = [t for t in transfers(local.joint.graph) if t.calls[0].kind == "all_gather"]
    return [(position[t.node], t.first_use, t.result_bytes) for t in found if t.node.meta["phase"] == "forward"]


def test_parameters_are_gathered_ahead() -> None:
    """ZeRO-3: the next gathers are under way while one is used, twice the largest at most, and within a budget."""
    model, args, kwargs = models.mlp()
    program = annotate(capture(model, args, kwargs))
    plan = make_plan(program, Mesh((2,)), Options(constraints={"*": "batch; zero3"}, disable=("bucket_collectives",)))
    found = gathers(plan, program)
    assert len(found) > 3
    ahead = [sum(size for start, use, size in found if start <= at < use) for at in range(max(u for _, u, _ in found))]
    largest = max(size for _, _, size in found)
    assert largest < max(ahead) <= (AHEAD + 1) * largest  # one is in use, or about to be

    tight = msgspec.structs.replace(plan, options=msgspec.structs.replace(plan.options, memory=1))
    peak = live_bytes(lower(program, plan, (0,), run=False, improved=False)).peak_bytes
    assert live_bytes(lower(program, tight, (0,), run=False)).peak_bytes <= peak
    assert sum(use - start for start, use, _ in gathers(tight, program)) < sum(use - start for start, use, _ in found)
