"""Captured graphs compute what the models compute, and know where each node comes from."""

from __future__ import annotations

import pytest
import torch

from autopar.passes.capture import capture
from autopar.passes.program import check_program
from tests.captured import assert_same_step, run_eager, run_program
from tests.models import MODELS, gpt2, llama


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("name", MODELS)
def test_step_equals_eager(name: str, dropout: float) -> None:
    """Loss, outputs, every gradient and every new buffer equal eager ones under the same seed, dropout included."""
    model, args, kwargs = MODELS[name](dropout=dropout)
    program = check_program(capture(model, args, kwargs))
    assert program.training and program.loss == 0
    assert sum(role.kind == "tangent" for role in program.inputs) == 1
    captured = run_program(program, model, args, kwargs, seed=3)
    assert_same_step(captured, run_eager(program, model, args, kwargs, seed=3))


@pytest.mark.parametrize("name", MODELS)
def test_eval_equals_eager(name: str) -> None:
    """A model in eval mode is captured forward only and gives the eager outputs."""
    model, args, kwargs = MODELS[name](dropout=0.5)
    model.eval()
    program = check_program(capture(model, args, kwargs))
    assert not program.training
    assert {role.kind for role in program.outputs} == {"output"}
    assert_same_step(run_program(program, model, args, kwargs), run_eager(program, model, args, kwargs))


@pytest.mark.parametrize("name", MODELS)
def test_no_merged_dims_in_products(name: str) -> None:
    """Every product of activations with a weight sees batch and sequence as dims of their own."""
    model, args, kwargs = MODELS[name]()
    program = capture(model, args, kwargs)
    targets = {str(node.target) for node in program.ops()}
    assert not targets & {"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten._softmax.default"}
    if name in ("mlp", "resnet"):
        return
    products = [node for node in program.ops() if str(node.target) == "autopar.contract.default"]
    for node in products:
        weighted = node.meta["phase"] == "forward" and node.args[1].op == "placeholder"
        if weighted and node.meta["module"] != "classifier":
            assert node.args[0].meta["val"].dim() == 3, node.format_node()


def test_provenance() -> None:
    """Forward nodes carry module and source line; backward nodes those of the forward node that they belong to."""
    model, args, kwargs = gpt2()
    program = capture(model, args, kwargs)
    nodes = program.nodes()
    for node in program.ops():
        assert node.meta["source"], node.format_node()
        if node.meta["phase"] == "backward":
            forward = nodes[node.meta["forward_node"]]
            assert forward.meta["phase"] == "forward"
            assert (forward.meta["module"], forward.meta["source"]) == (node.meta["module"], node.meta["source"])
    products = [node for node in program.ops() if str(node.target) == "autopar.contract.default"]
    up = [node for node in products if node.meta["module"] == "transformer.h.1.mlp.c_fc"]
    assert [node.meta["phase"] for node in up] == ["forward", "backward", "backward"]
    assert all("pytorch_utils.py:" in node.meta["source"] for node in up)
    assert {node.meta["forward_node"] for node in up[1:]} == {up[0].name}


def test_causal_attention_without_mask() -> None:
    """A mask that depends on no input is seen through: attention stays causal, with grouped heads."""
    model, args, kwargs = llama()
    attentions = [n for n in capture(model, args, kwargs).ops() if str(n.target) == "autopar.attention.default"]
    assert len(attentions) == 2
    for node in attentions:
        assert node.args[3] is None and node.args[4] is True
        assert [operand.meta["val"].shape[1] for operand in node.args[:3]] == [4, 2, 2]


def test_deterministic() -> None:
    """Two captures have the same fingerprint, names and order; the model and the random state stay as they were."""
    model, args, kwargs = gpt2(dropout=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    one, two = capture(model, args, kwargs), capture(model, args, kwargs)
    assert one.fingerprint() == two.fingerprint()
    assert [n.name for n in one.graph.nodes] == [n.name for n in two.graph.nodes]
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_meta_model_gives_the_same_program() -> None:
    """A model and inputs on the meta device are captured into the program of the real ones."""
    model, args, kwargs = llama()
    real = capture(model, args, kwargs)
    meta = capture(model.to("meta"), args, {name: value.to("meta") for name, value in kwargs.items()})
    assert real.fingerprint() == meta.fingerprint()
    assert all(role.node for role in meta.outputs)
