"""The passes over segments of stages."""

from __future__ import annotations

import pytest
from torch import fx

from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.cut_stages import cut_stages
from autopar.passes.improve.improve_stages import improve_stages
from autopar.passes.is_uneven import is_uneven
from autopar.passes.lower import lower
from autopar.passes.micro_batches import micro_batches
from autopar.passes.stage_pieces import StagedProgram
from tests import models
from tests.strategies.plans import seeded_plan


def graphs_of(staged: StagedProgram) -> list[fx.Graph]:
    """Return the graphs of all segments."""
    return [segment.graph_module.graph for piece in staged.stages for segment in piece.segments.values()]


@pytest.mark.parametrize("memory_bytes", [None, 1])
def test_segments_are_improved_alike_on_every_rank(memory_bytes: int | None) -> None:
    """Three ranks with unequal pieces: sequences change, stay alike, and take and give what they did."""
    model, args, kwargs = models.mlp()
    cut = micro_batches(annotate(capture(model, args, kwargs)), 2)
    mesh = Mesh((3,))
    plan = seeded_plan(cut, mesh, 4)
    locals_ = [lower(cut, plan, c, run=False, improved=False) for c in mesh.coordinates()]
    assert is_uneven(locals_[0].joint, cut, mesh)
    ranks = [cut_stages(local, {}, 1, 2, callable_segments=False) for local in locals_]
    before = [[node.name for node in graph.nodes] for graph in graphs_of(ranks[0])]
    improve_stages(ranks, mesh, memory_bytes)
    after = [[[node.name for node in graph.nodes] for graph in graphs_of(rank)] for rank in ranks]
    assert after[0] == after[1] == after[2]
    assert after[0] != before
    for rank in ranks:
        for piece in rank.stages:
            for segment in piece.segments.values():
                graph = segment.graph_module.graph
                graph.lint()
                assert [n.name for n in graph.nodes if n.op == "placeholder"] == list(segment.takes)
                assert len(graph.output_node().args[0]) == len(segment.gives)  # type: ignore[arg-type]
