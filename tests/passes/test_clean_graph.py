"""A raw graph is rebuilt without duplicates, dead code and ops that do nothing; random ops stay."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.passes.capture import capture


def ops_of(function: Any, *args: Tensor) -> list[str]:
    """Return the names of the forward ops of a function, without the backward."""

    class Call(nn.Module):
        def forward(self, *inputs: Tensor) -> Any:
            return function(*inputs)

    program = capture(Call(), args or (torch.randn(2, 3, 4),))
    return [node.name for node in program.graph.nodes if node.op == "call_function"]


def test_duplicates() -> None:
    """Equal ops on equal operands are one; 1, 1.0 and True are not equal."""
    assert ops_of(lambda x: x.exp() + x.exp()) == ["exp", "add"]
    assert ops_of(lambda x: (x.long() + 2, x.long() + 2.0)) == ["_to_copy", "add", "add_1"]


def test_nothing() -> None:
    """Ops that return their operand vanish."""
    x = torch.randn(2, 3, 4)
    assert ops_of(lambda x: x.detach().view(2, 3, 4).expand(2, 3, 4).float()[:, :].permute(0, 1, 2) * 1 + 0, x) == []
    assert ops_of(lambda x: x.clone().pow(1).div(1.0), x) == []
    assert ops_of(lambda x: x.transpose(0, 1).contiguous(), x) == ["transpose", "clone"]


def test_integers_stay_integers() -> None:
    """A neutral number that changes the dtype is not neutral."""
    assert ops_of(lambda x: x * 1.0, torch.arange(3)) == ["mul"]
    assert ops_of(lambda x: x / 1, torch.arange(3)) == ["div"]


def test_chains_of_views() -> None:
    """Views of views are one view, with its sizes written out."""

    class Call(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(-1, 4).view(2, -1)[:, 2:].sum(0)

    program = capture(Call(), (torch.randn(2, 3, 4),))
    view, cut, _ = program.ops()
    assert view.args[1] == [2, 12] and cut.args[1:] == (1, 2, 12)


def test_bias_gradient_is_one_sum() -> None:
    """A sum that keeps dims only for a view to drop them is one sum."""
    program = capture(nn.Linear(4, 5), (torch.randn(2, 3, 4),))
    backward = [node.name for node in program.ops() if node.meta["phase"] == "backward"]
    assert sorted(name.split("_")[0] for name in backward) == ["contract", "sum"]


def test_dead_random_ops_stay() -> None:
    """A mask that nobody reads is still drawn, for the numbers after it; other dead code goes."""
    names = ops_of(lambda x: (F.dropout(x, 0.5), x.exp(), F.dropout(x, 0.5))[2])
    assert names == ["bernoulli", "bernoulli_1", "mul", "mul_1"]
