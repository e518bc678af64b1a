"""Random draws are a function of the global element, and split like any tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.passes.capture import capture
from tests.verified import Around, verified_function


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * torch.rand(4, 6)).tanh(),
        lambda x: x + torch.randn_like(x),
        lambda x: x * torch.empty(4, 1).bernoulli_(0.7),
        lambda x: x * torch.empty(4, 6).uniform_(-1, 1),
        lambda x: x * torch.empty(4, 6).normal_(1, 2),
        lambda x: x * torch.randint(0, 5, (4, 6)),
        lambda x: x[torch.randperm(4)] * torch.arange(4)[:, None],
        lambda x: x * torch.bernoulli(torch.full((4, 6), 0.5)),
        lambda x: F.gumbel_softmax(x),
        lambda x: F.alpha_dropout(x, 0.5, True),
    ],
)
def test_draws(function: Callable[[Tensor], Tensor]) -> None:
    """Every plan draws eager's numbers, and none is bound to draw them whole."""
    program = verified_function(function)
    assert [str(node.target) for node in program.ops() if node.meta["rule"].reason] == []


def test_noise_like_another_leaves_that_one_split() -> None:
    """Nobody gathers an activation to draw noise of its shape."""
    program = verified_function(lambda x: x + torch.randn_like(x))
    noise = next(node for node in program.ops() if node.target is torch.ops.aten.randn_like.default)
    splits = [choice for choice in noise.meta["rule"].choices() if choice.factor is not None]
    assert [choice.operands for choice in splits] == [choice.results for choice in splits] == [(0,), (1,)]


def test_draws_from_what_has_a_gradient() -> None:
    """They may be returned, though torch can't differentiate them: eager refuses only who asks for it."""
    model = Around(lambda x: (x * 2, torch.bernoulli(x.sigmoid()), x.sigmoid().bernoulli(0.3)))
    program = capture(model, (torch.randn(4, 6, dtype=torch.float64),))
    seen = [role.differentiable for role in program.outputs if role.kind == "output"]
    assert seen == [True, False, False]
