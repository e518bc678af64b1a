"""``F.scaled_dot_product_attention`` in every form: whole where the op can say it, apart where it can't."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from autopar.passes.program import Program
from tests.passes.test_trace_loss import compare, draw


def attentions(program: Program) -> list[Any]:
    """Return the arguments after q, k and v of every attention of a program."""
    return [node.args[3:] for node in program.ops() if str(node.target) == "autopar.attention.default"]


def run(*args: Any, **options: Any) -> Tensor:
    """Call torch's attention."""
    return F.scaled_dot_product_attention(*args, **options)


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 5, 8), (2, 2, 3, 5, 8)])
@pytest.mark.parametrize("causal", [False, True])
def test_dims(causal: bool, shape: tuple[int, ...]) -> None:
    """Any number of leading dims; the default scale."""
    x = draw(*shape)
    program = compare(lambda q, k, v: run(q, k, v, is_causal=causal), x, x + 0.1, x - 0.1)
    assert attentions(program) == [(None, causal, pytest.approx(8**-0.5), 0)]


@pytest.mark.parametrize("mask_shape", [(5, 6), (2, 1, 5, 6), (1, 6), (3, 1, 6)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks(kind: str, mask_shape: tuple[int, ...]) -> None:
    """Masks that broadcast in any way, boolean and additive, with cross attention and a scale."""
    mask = draw(*mask_shape)
    mask = mask > -0.5 if kind == "bool" else mask
    args = (draw(2, 3, 5, 8), draw(2, 3, 6, 8), draw(2, 3, 6, 8) + 0.2)
    program = compare(lambda q, k, v, m: run(q, k, v, attn_mask=m, scale=0.2), *args, mask)
    ((found, causal, scale, offset),) = attentions(program)
    assert found.meta["val"].dim() == 4 and (causal, scale, offset) == (False, 0.2, 0)


def test_mask_of_many_dims() -> None:
    """A mask goes with queries of more than four dims."""
    x, mask = draw(2, 2, 3, 5, 8), draw(2, 1, 1, 5, 5)
    assert attentions(compare(lambda q, k, v, m: run(q, k, v, attn_mask=m), x, x + 0.1, x - 0.1, mask))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_heads(groups: int) -> None:
    """Keys and values stay grouped."""
    q, k = draw(2, 4, 5, 8), draw(2, groups, 5, 8)
    program = compare(lambda q, k, v: run(q, k, v, is_causal=True, enable_gqa=True), q, k, k + 0.1)
    (node,) = [node for node in program.ops() if str(node.target) == "autopar.attention.default"]
    assert node.args[1].meta["val"].shape[1] == groups


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_dropout_takes_it_apart(grouped: bool, causal: bool) -> None:
    """With dropout, attention is a product, a softmax, a mask and a product, which draw as eager does."""
    q, k = draw(2, 4, 5, 8), draw(2, 2 if grouped else 4, 5, 8)
    program = compare(lambda q, k, v: run(q, k, v, None, 0.4, causal, enable_gqa=grouped), q, k, k + 0.1)
    assert not attentions(program)
    assert any(str(node.target) == "autopar.bernoulli.default" for node in program.ops())


def test_dropout_with_masks() -> None:
    """Dropout goes with both kinds of mask, and a row that sees nothing gives zeros."""
    x, seen = draw(2, 4, 5, 8), draw(2, 1, 5, 5) > 0
    seen[0, 0, 1] = False
    compare(lambda q, k, v, m: run(q, k, v, m, 0.3), x, x + 0.1, x - 0.1, seen)
    compare(lambda q, k, v, m: run(q, k, v, m, 0.3), x, x + 0.1, x - 0.1, draw(2, 1, 5, 5))


def test_mask_with_gradient_takes_it_apart() -> None:
    """A mask that wants a gradient, such as a learned bias, gets it."""
    q, bias = draw(2, 4, 5, 8), draw(1, 4, 5, 5).requires_grad_()
    program = compare(lambda q, k, v, m: run(q, k, v, m), q, q + 0.1, q - 0.1, bias)
    assert not attentions(program)
    assert any(role.kind == "gradient" and role.name == "args[3]" and role.node for role in program.outputs)


def test_broadcast_batch() -> None:
    """A batch of keys that broadcasts over the queries' is expanded."""
    assert attentions(compare(run, draw(2, 3, 5, 8), draw(1, 3, 5, 8), draw(1, 3, 5, 8) + 0.1))


@pytest.mark.parametrize("shape", [(3, 5, 8), (2, 3, 5, 8), (2, 2, 3, 5, 8)])
def test_results_lie_in_memory_as_in_eager(shape: tuple[int, ...]) -> None:
    """Heads that were split off by a transpose: a model may view the result."""
    x = draw(*shape).transpose(-2, -3).contiguous().transpose(-2, -3)
    program = compare(lambda q, k, v: run(q.transpose(-2, -3).contiguous().transpose(-2, -3), k, v), x, x + 0.1, x)
    (result,) = [program.nodes()[str(role.node)].meta["val"] for role in program.outputs if role.kind == "output"]
    assert result.stride() == run(x, x, x).stride()
