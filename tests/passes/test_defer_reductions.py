"""Which gradients can wait for those of later backwards, and the backward that leaves them."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import fx

from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.collective_calls import collective_calls
from autopar.passes.complete_plan import complete_plan
from autopar.passes.defer_reductions import defer_reductions
from autopar.passes.flatten_buckets import flattened
from autopar.passes.local_program import LocalProgram
from autopar.passes.lower import lower
from autopar.passes.program import Program
from autopar.placement import PARTIAL_SUM, REPLICATE
from benchmarks.memory import batch_choices
from tests import models


@cache
def program() -> Program:
    """Return an MLP's program."""
    model, args, kwargs = models.mlp()
    return annotate(capture(model, args, kwargs))


def lowered(rest: int, size: int = 2, disable: tuple[str, ...] = ()) -> LocalProgram:
    """Return data parallelism whose matrices rest as told, vectors whole where they have no such dim."""
    made = program()
    dims = {role.name: made.nodes()[role.node].meta["val"].dim() for role in made.inputs if role.kind == "parameter"}
    layouts = {name: (rest if rest < count else REPLICATE,) for name, count in dims.items()}
    return lower(made, complete_plan(made, Mesh((size,)), batch_choices(made), layouts), (0,), run=False)


def kinds(graph: fx.Graph) -> list[str]:
    """Return the kinds of all collectives."""
    return [call.kind for node in graph.nodes for call in collective_calls(node)]


@pytest.mark.parametrize(("rest", "size"), [(0, 2), (1, 2), (0, 3), (1, 3)])
def test_scattered_gradients_wait_when_asked(rest: int, size: int) -> None:
    """On any dim, in even and uneven pieces: no gradient is reduced any more, and sums are taken in turn."""
    local = lowered(rest, size)
    assert local.backward is not None
    found, alone = defer_reductions(local, scattered=True), defer_reductions(local)
    assert found is not None and set(found.layouts) == {(PARTIAL_SUM,)}
    assert len(found.positions) == len([role for role in local.inputs if role.kind == "parameter"])
    assert alone is None or len(alone.positions) < len(found.positions)
    before, after = kinds(local.backward.graph), kinds(found.without.graph)
    sums = ("all_reduce", "reduce_scatter")
    assert sum(kind in sums for kind in before) - sum(kind in sums for kind in after) >= len(found.positions)
    assert kinds(found.resumed.graph) == before
    counts = [len([n for n in half.graph.nodes if n.op == "placeholder"]) for half in (local.backward, found.resumed)]
    assert counts[1] == counts[0] + len(found.positions)


def test_a_sum_into_which_somebody_writes_does_not_wait() -> None:
    """Its memory was free behind the reduction, and is not when it is handed out."""
    local = lowered(REPLICATE)
    found = defer_reductions(local)
    assert found is not None and local.backward is not None
    graph = local.backward.graph
    starts: Any = found.without.graph.output_node().args[0]
    start = next(node for node in graph.nodes if node.name == starts[found.positions[0]].name)
    readers = list(start.users)
    with graph.inserting_after(start):
        handed, written = (graph.call_function(torch.ops.aten.alias.default, (start,)) for _ in range(2))
    handed.meta = dict(start.meta)
    for reader in readers:
        reader.replace_input_with(start, handed)
    unwritten = defer_reductions(local)
    assert unwritten is not None and unwritten.positions == found.positions
    with graph.inserting_before(graph.output_node()):
        graph.call_function(torch.ops.aten.mul_.Tensor, (written, 2))
    again = defer_reductions(local)
    assert again is not None and again.positions == found.positions[1:]
    before, after = kinds(graph), kinds(again.without.graph)
    assert len(before) - len(after) == len(again.positions), "it leaves its bucket, and the others stay there"
    assert "all_reduce" in kinds(flattened(again.without).graph)
