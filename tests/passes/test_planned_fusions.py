"""What other compilers fuse behind the plan is in the plan: no pass runs in these graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.collective_calls import WAIT, Call, collective_calls
from autopar.passes.lower import lower
from autopar.passes.pipeline import make_plan
from autopar.plans import Options

ROWS, WIDTH, HIDDEN = 65536, 512, 2048
SPLIT = {"*.weight": "zero3"}


class Pair(nn.Module):
    """Two products whose weights rest in one dtype and are computed with in another."""

    def __init__(self, rests: torch.dtype, computes: torch.dtype) -> None:
        super().__init__()
        self.computes = computes
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False, dtype=rests)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False, dtype=rests)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return a scalar."""
        hidden = F.relu(F.linear(x.to(self.computes), self.up.weight.to(self.computes)))
        return F.mse_loss(F.linear(hidden, self.down.weight.to(self.computes)).float(), y)


def lowered(
    sizes: tuple[int, ...],
    constraints: Mapping[str, str],
    rests: torch.dtype = torch.float32,
    computes: torch.dtype = torch.float32,
) -> fx.Graph:
    """Return the graph of the first rank under the best plan, every arc as the plan has it."""
    with torch.device("meta"):
        model, x = Pair(rests, computes), torch.randn(ROWS, WIDTH)
    program = annotate(capture(model, (x, x)))
    plan = make_plan(program, Mesh(sizes, device="h100"), Options(constraints=dict(constraints)))
    assert plan.solver.status == "optimal"
    return lower(program, plan, (0,) * len(sizes), run=False, improved=False).joint.graph


def large_calls(graph: fx.Graph) -> list[Call]:
    """Return the collectives of more than a few numbers, in order."""
    return [call for node in graph.nodes for call in collective_calls(node) if call.operand.meta["val"].numel() > 8]


@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_a_sum_that_is_wanted_split_is_scattered(sizes: tuple[int, ...]) -> None:
    """A reduce-scatter, no all-reduce and slice: what an all-reduce brings is never cut along its axis."""
    graph = lowered(sizes, SPLIT)
    kinds = Counter(call.kind for call in large_calls(graph) if call.operand.meta["phase"] == "backward")
    assert kinds["reduce_scatter"] >= 2
    for node in graph.nodes:
        if node.target is WAIT and node.meta["arc"] == "all_reduce":
            assert "slice" not in [user.meta.get("arc") for user in node.users]


@pytest.mark.parametrize(
    ("rests", "computes"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str
)
def test_bytes_travel_in_the_narrower_dtype(rests: torch.dtype, computes: torch.dtype) -> None:
    """A cast that narrows comes before the gather, one that widens behind it; sums keep the dtype they are made in."""
    calls = large_calls(lowered((2,), SPLIT, rests, computes))
    assert Counter(call.kind for call in calls) == {"all_gather": 2, "reduce_scatter": 2}
    piece = WIDTH * HIDDEN * torch.bfloat16.itemsize // 2
    assert [call.bytes_in for call in calls if call.kind == "all_gather"] == [piece, piece]
    sums = [call for call in calls if call.kind == "reduce_scatter"]
    assert {call.operand.meta["val"].dtype for call in sums} == {computes}


def test_what_is_there_is_not_brought_again() -> None:
    """A weight that both phases read is gathered once where its copy is kept, and each layout comes to be once."""
    graph = lowered((2,), SPLIT)
    made = [
        (node.meta["tensor"], node.meta["layout"], node.meta["phase"])
        for node in graph.nodes
        if "arc" in node.meta and "layout" in node.meta
    ]
    assert made and len(made) == len(set(made))
    moved = Counter(call.operand.meta["origin"] for call in large_calls(graph) if call.kind == "all_gather")
    assert moved and set(moved.values()) == {1}


def test_a_column_split_before_a_row_split_moves_nothing_between() -> None:
    """The pieces of the hidden values lie where the second product wants them: no gather, no exchange."""
    graph = lowered((2,), {"op:contract": "column", "op:contract_1": "row"})
    moved = [tuple(call.value.shape) for call in large_calls(graph)]
    assert moved and all(HIDDEN not in shape and HIDDEN // 2 not in shape for shape in moved)


def test_an_axis_of_one_rank_moves_nothing() -> None:
    """It has no arcs: the collectives are those of a mesh without the axis, none where there is no other."""
    assert [call for node in lowered((1,), {}).nodes for call in collective_calls(node)] == []
    one, two = (
        [(call.kind, call.bytes_in) for node in lowered(sizes, SPLIT).nodes for call in collective_calls(node)]
        for sizes in ((2,), (2, 1))
    )
    assert one == two
