"""Waits stand where results are needed."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.improve.transfers import Transfer, transfers
from autopar.passes.improve.wait_late import HELD
from autopar.passes.lower import lower
from autopar.passes.pipeline import make_plan
from autopar.plans import Options, Plan
from tests import models
from tests.strategies.plans import seeded_plan


def waited(each: Transfer, position: dict[fx.Node, int]) -> int:
    """Return the position of the last node that finishes a collective."""
    return max(position[node] for node in each.after)


def early_waits(graph: fx.Graph) -> list[str]:
    """Return the waits that stand before their use though nothing else asks for memory there."""
    nodes = list(graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    found = transfers(graph)
    moving = {node for each in found for node in (*each.before, each.node, *each.after)}
    bound = HELD * max((each.held_bytes for each in found), default=0)
    out = []
    for each in found:
        end = waited(each, position)
        if all(node in moving for node in nodes[end + 1 : each.first_use]):
            continue
        start = end
        while nodes[start - 1] in moving:
            start -= 1
        following = next((other for other in found if position[other.node] > end), None)
        under_way = [o for o in found if o is not each and position[o.node] < end and waited(o, position) >= start]
        held = sum(other.held_bytes for other in [each, *under_way, *([following] if following else [])])
        if held <= bound:
            out.append(each.node.name)
    return out


def plan_of(name: str, how: str) -> tuple[object, Plan]:
    """Return the program of a standard model and a plan for two or four ranks."""
    model, args, kwargs = getattr(models, name)()
    program = annotate(capture(model, args, kwargs))
    if how == "random":
        return program, seeded_plan(program, Mesh((2, 2)), 3)
    return program, make_plan(program, Mesh((2,)), Options(constraints={"*": f"batch; {how}"}))


@pytest.mark.parametrize(("name", "how"), [("mlp", "zero3"), ("bert", "random"), ("gpt2", "zero3"), ("gpt2", "random")])
def test_no_wait_comes_before_its_use(name: str, how: str) -> None:
    """Between a wait and the first use of what it brings nothing computes, unless too much would be kept."""
    program, plan = plan_of(name, how)
    assert early_waits(lower(program, plan, (0,) * plan.mesh.num_axes, run=False).joint.graph) == []  # type: ignore[arg-type]


def test_without_the_pass_waits_are_early() -> None:
    """The check can fail."""
    program, plan = plan_of("mlp", "zero3")
    assert early_waits(lower(program, plan, (0,), run=False, improved=False).joint.graph) != []  # type: ignore[arg-type]


def test_gradients_are_reduced_behind_the_backward() -> None:
    """Data parallel: gradients are on their way while others are computed, and none is awaited before all are."""
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(512, 512), torch.nn.ReLU())]
    program = annotate(capture(torch.nn.Sequential(*layers), (torch.empty(8192, 512),)))
    plan = make_plan(
        program, Mesh((2,), device="h100"), Options(constraints={"*": "batch; zero0"}, disable=("bucket_collectives",))
    )
    graph = lower(program, plan, (0,), run=False).joint.graph
    position = {node: index for index, node in enumerate(graph.nodes)}
    end = position[graph.output_node()]
    sent = [each for each in transfers(graph) if each.node.meta["phase"] == "backward" and each.first_use == end]
    computed = max(i for n, i in position.items() if n.meta.get("phase") == "backward" and "arc" not in n.meta)
    assert sent and all(waited(each, position) > computed for each in sent)
    assert min(position[each.node] for each in sent) < computed
