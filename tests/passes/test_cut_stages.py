"""Where nodes stand when a program is cut: homes, messages, duplicates, what comes once or for each micro-batch."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from autopar.errors import OptionError
from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.assign_stages import assign_stages
from autopar.passes.balance_stages import balance_stages, name_cut
from autopar.passes.capture import capture
from autopar.passes.complete_plan import complete_plan
from autopar.passes.cut_stages import cut_stages
from autopar.passes.lower import lower
from autopar.passes.micro_batches import INDEX, micro_batches
from autopar.passes.program import Program
from autopar.passes.save_at_cuts import save_at_cuts
from autopar.passes.stage_pieces import BACKWARD, BEGIN, END, FORWARD, WEIGHT, StagedProgram
from tests import models


@cache
def program(name: str = "gpt2") -> Program:
    """Return a model's program of a micro-batch."""
    model, args, kwargs = getattr(models, name)()
    return micro_batches(annotate(capture(model, args, kwargs)), 2, staged=True)


def staged(cuts: tuple[str, ...], split: bool = False, name: str = "gpt2") -> StagedProgram:
    """Return it on one rank a stage, cut."""
    made = program(name)
    local = lower(made, complete_plan(made, Mesh((1,)), {}, {}), (0,), run=False)
    stages = assign_stages(made, cuts)
    return cut_stages(local, stages, len(cuts) + 1, 2, split_backward=split, callable_segments=False)


def test_stages_follow_the_graph() -> None:
    """A module's path means its first op; stages are contiguous."""
    made = program()
    stages = assign_stages(made, ["transformer.h.1", "lm_head"])
    order = [stages[node.name] for node in made.ops() if node.meta["phase"] == "forward"]
    assert order == sorted(order) and set(order) == {0, 1, 2}
    modules = {node.meta["module"]: stages[node.name] for node in made.ops() if node.name in stages}
    assert modules["transformer.h.0.mlp.c_fc"] == 0
    assert modules["transformer.h.1.mlp.c_fc"] == 1
    assert modules["lm_head"] == 2


@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        (["nowhere"], "no stage can start at 'nowhere'"),
        (["lm_head", "transformer.h.1"], "would be empty or come before"),
        (["lm_head", "lm_head"], "would be empty or come before"),
        (["transformer"], "a stage that ends before 'transformer' is empty"),
    ],
)
def test_cuts_that_cannot_be_made(cuts: list[str], words: str) -> None:
    """Each says which cut and why."""
    with pytest.raises(OptionError, match=words):
        assign_stages(program(), cuts)


def test_a_tied_table_has_one_home() -> None:
    """Its value goes on once before the micro-batches, its gradient comes back once after; activations each time."""
    pieces = staged(("transformer.h.1",))
    first, second = pieces.stages
    table = next(role.node for role in pieces.inputs if role.name == "transformer.wte.weight")
    assert table in first.owns and table not in second.owns
    assert second.down[BEGIN] == (table,)
    assert len(second.down[FORWARD]) == 1 and len(first.up[BACKWARD]) == 1 and len(first.up[END]) == 1
    values = [pieces.travelling[name] for name in (*second.down[FORWARD], *first.up[BACKWARD])]
    assert {tuple(value.shape) for value in values} == {(2, 12, 32)}
    assert not set(first.owns) & set(second.owns)


def test_a_value_passes_through_the_stages_between() -> None:
    """The encoder's output goes through a stage of the decoder to the next one."""
    pieces = staged(("decoder", "decoder.block.1"), name="t5")
    shared = set(pieces.stages[1].down[FORWARD]) & set(pieces.stages[2].down[FORWARD])
    assert shared


def test_masks_are_made_where_they_are_read() -> None:
    """What depends on inputs alone does not travel."""
    pieces = staged(("bert.encoder.layer.1",), name="bert")
    for stage in pieces.stages:
        assert "attention_mask" in " ".join(stage.placeholders)
        assert INDEX in stage.placeholders
    assert len(pieces.stages[1].down[FORWARD]) == 1


def test_the_backward_in_two_parts() -> None:
    """The first has what earlier stages wait for; the first stage has nothing to send, so all is its second part."""
    pieces = staged(("transformer.h.1",), split=True)
    first, second = pieces.stages
    assert WEIGHT in second.segments and BACKWARD in second.segments
    assert BACKWARD not in first.segments
    sent = set(pieces.sent_up(1, BACKWARD))
    assert sent <= set(second.segments[BACKWARD].gives)
    whole = staged(("transformer.h.1",)).stages[1].segments[BACKWARD]

    def ops(graph_module: torch.fx.GraphModule) -> int:
        return sum(node.op == "call_function" for node in graph_module.graph.nodes)

    parts = ops(second.segments[BACKWARD].graph_module) + ops(second.segments[WEIGHT].graph_module)
    assert parts == ops(whole.graph_module)


def test_what_crosses_a_cut_is_saved() -> None:
    """An op whose result a later stage reads is not computed again there; all others are as the plan says."""
    made = program("llama")
    forward = [node.name for node in made.ops() if node.meta["phase"] == "forward"]
    plan = complete_plan(made, Mesh((1,)), {}, {}, recomputed=forward)
    stages = assign_stages(made, ["model.layers.1"])
    kept = save_at_cuts(made, plan, stages)
    gone = set(plan.recomputed) - set(kept.recomputed)
    nodes = made.nodes()
    assert gone and all(any(stages.get(u.name, 0) > stages[name] for u in nodes[name].users) for name in gone)
    assert gone <= set(kept.saved)
    assert save_at_cuts(made, plan, assign_stages(made, [])) == plan


def test_balanced_stages_start_at_modules() -> None:
    """Equal blocks give equal stages; more stages than places is an error."""
    made = program("vit")
    assert balance_stages(made, 1) == ()
    assert balance_stages(made, 2) == ("vit.layers.1",)
    ops = [node for node in made.ops() if node.meta["phase"] == "forward"]
    layer = next(i for i, node in enumerate(ops) if node.meta["module"].startswith("vit.layers.1"))
    assert name_cut(ops, layer) == "vit.layers.1"
    assert name_cut(ops, layer + 1) != "vit.layers.1"
    with pytest.raises(OptionError, match="1000 stages are asked for, but the model can be cut in"):
        balance_stages(made, 1000)
