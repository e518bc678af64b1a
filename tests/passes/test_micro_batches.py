"""What a program becomes when its batch is split over time: what loops, what runs once, what is a total."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import OptionError
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.micro_batch_choices import batch_size, choose_micro_batches
from autopar.passes.micro_batches import INDEX, completes, micro_batches, varying
from autopar.passes.program import Program, check_program, is_random
from autopar.passes.rules.micro_batches import BERNOULLI_PART, JOIN, MICRO_BATCH, OVER
from tests import models


def captured(name: str) -> Program:
    """Return one of the tests' models, annotated."""
    model, args, kwargs = getattr(models, name)(0.1)
    return annotate(capture(model, args, kwargs))


def test_a_micro_batch_is_a_program() -> None:
    """It has the number as one more input, parts of the inputs, and a total for the loss and for every gradient."""
    program = captured("mlp")
    cut = check_program(micro_batches(program, 4))
    assert cut.micro_batches == 4 and program.micro_batches == 1
    assert [role.name for role in cut.inputs if role.node == INDEX] == [INDEX]
    nodes = cut.nodes()
    ends = [nodes[str(role.node)] for role in cut.outputs if role.node is not None]
    assert all(end.target is OVER and end.args[1] == "sum" for end in ends)
    parts = [node for node in cut.graph.nodes if node.target is MICRO_BATCH]
    assert all(node.meta["val"].shape[0] == 2 for node in parts)
    assert [node for node in cut.graph.nodes if node.target is BERNOULLI_PART]


@pytest.mark.parametrize("name", ["tied", "unet"])
def test_only_totals_run_once(name: str) -> None:
    """Attention of torch, whose rows and heads are merged in one view, and group norms need no other rows."""
    cut = micro_batches(captured(name), 2)
    moves = varying(cut.graph, {INDEX: None})
    products = [n for n in cut.graph.nodes if str(n.target) in ("autopar.contract.default", "aten.convolution.default")]
    assert len(products) > 4
    assert all(moves[node] for node in products)


def test_labels_are_counted_once() -> None:
    """The number of labels that count needs no micro-batch: it is there before the first."""
    cut = micro_batches(captured("gpt2"), 2)
    moves = varying(cut.graph, {INDEX: None})
    counts = [n for n in cut.graph.nodes if n.target is torch.ops.aten.sum.default and not moves[n]]
    assert counts
    assert all(not completes(source) for node in counts for source in node.all_input_nodes)


def test_random_ops_loop_in_order() -> None:
    """Each micro-batch draws what one device draws, in the same order."""
    program = captured("gpt2")
    cut = micro_batches(program, 2)
    moves = varying(cut.graph, {INDEX: None})
    drawn = [node.name for node in cut.graph.nodes if is_random(node)]
    assert drawn == [node.name for node in program.graph.nodes if is_random(node)]
    assert all(moves[node] for node in cut.graph.nodes if is_random(node))


def test_outputs_beside_a_loss() -> None:
    """They are left out, or joined where they are asked for."""
    model = nn.Linear(3, 5)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            logits = self.inner(x)
            return {"loss": F.cross_entropy(logits, y), "logits": logits}

    program = annotate(capture(Both(), (torch.randn(4, 3), torch.tensor([0, 1, 2, 3]))))
    left = micro_batches(program, 2)
    assert [role.node is None for role in left.outputs if role.kind == "output"] == [False, True]
    asked = micro_batches(program, 2, outputs="lie")
    logits = next(role for role in asked.outputs if role.name == "['logits']")
    assert asked.nodes()[str(logits.node)].target is JOIN


def test_summands_of_a_tied_gradient_are_accumulated_apart() -> None:
    """With stages the gradients of a tied table travel once a step: the sum stands behind the totals."""
    program = captured("gpt2")
    role = next(r for r in program.outputs if r.kind == "gradient" and r.name == "transformer.wte.weight")
    together, apart = micro_batches(program, 2), micro_batches(program, 2, staged=True)

    def end(cut: Program) -> object:
        found = next(r for r in cut.outputs if r.kind == "gradient" and r.name == role.name)
        return cut.nodes()[str(found.node)].target

    assert end(together) is OVER
    assert end(apart) is torch.ops.aten.add.Tensor


def test_a_weight_is_never_cut() -> None:
    """Choices follow the batch: no parameter is read in parts."""
    program = captured("bert")
    choices = choose_micro_batches(program, 2)
    nodes = program.nodes()
    for role in program.inputs:
        if role.kind == "parameter":
            for user in nodes[role.node].users:
                slot = [operand.name for operand in user.all_input_nodes].index(role.node)
                if user.name in choices and len(user.all_input_nodes) == len(choices[user.name].operands):
                    assert choices[user.name].operands[slot] == -1


def test_the_batch() -> None:
    """It is the size of dim 0 that most inputs have; without one there is nothing to cut."""
    assert batch_size(captured("mlp"), 2) == 8
    scalar = annotate(capture(nn.ReLU(), (torch.tensor(1.0, requires_grad=True),)))
    with pytest.raises(OptionError, match="no input is a tensor with dims"):
        batch_size(scalar, 2)


def test_one_micro_batch() -> None:
    """Its outputs are totals of one part, so that a pipeline runs it as any other."""
    cut = check_program(micro_batches(captured("mlp"), 1))
    ends = [cut.nodes()[str(role.node)] for role in cut.outputs if role.node is not None]
    assert all(end.target is OVER and end.args[1] == "same" for end in ends)
