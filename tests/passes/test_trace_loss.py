"""Softmax and the losses on it: values and gradients in all their spellings, and no reduction hidden in an op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.passes.capture import capture
from autopar.passes.program import Program, check_program
from tests.captured import assert_same_step, run_eager, run_program

WHOLE = ("softmax", "nll_loss", "cross_entropy", "mean", "var")


class Call(nn.Module):
    """A module of one function of its scaled input."""

    def __init__(self, function: Any, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 1.5, dtype=dtype))
        self.function = function

    def forward(self, x: Tensor, *args: Any) -> Any:
        return self.function(x * self.scale, *args)


def compare(function: Any, *args: Any, near: float = 1e-9) -> Program:
    """Capture a function, compare values and gradients with eager, return the program."""
    model = Call(function, args[0].dtype)
    inputs = (args[0].clone().requires_grad_(), *args[1:])
    program = check_program(capture(model, inputs))
    assert_same_step(run_program(program, model, inputs, {}), run_eager(program, model, inputs, {}), near, near)
    names = [str(node.target) for node in program.ops()]
    assert not [name for name in names if any(word in name for word in WHOLE)], names
    return program


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return random numbers that are the same in every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def classes(*shape: int, high: int = 5, ignored: int | None = None) -> Tensor:
    """Return class labels; every third is ``ignored`` if that is given."""
    labels = torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1))
    if ignored is not None:
        labels.view(-1)[::3] = ignored
    return labels


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(5,), (4, 5), (4, 5, 3), (2, 5, 3, 2)])
def test_cross_entropy(shape: tuple[int, ...], weighted: bool, smoothing: float, reduction: str) -> None:
    """Every reduction, with weights and smoothing, over any number of dims, with ignored labels."""
    labels = classes(*shape[:1], *shape[2:], ignored=-100) if len(shape) > 1 else classes()
    weight = draw(5).abs() if weighted else None
    compare(
        lambda x, y: F.cross_entropy(x, y, weight, reduction=reduction, label_smoothing=smoothing), draw(*shape), labels
    )


@pytest.mark.parametrize("ignored", [-1, 2, 255])
def test_ignore_index(ignored: int) -> None:
    """Any index may be ignored, also one that is a class, and one that is none."""
    labels = classes(6, ignored=ignored)
    compare(lambda x, y: F.cross_entropy(x, y, ignore_index=ignored), draw(6, 5), labels)
    compare(lambda x, y: F.nll_loss(x.log_softmax(-1), y, ignore_index=ignored), draw(6, 5), labels)


def test_all_ignored() -> None:
    """A mean over nothing is nan, as in eager."""
    model = Call(lambda x, y: F.cross_entropy(x, y), torch.float32)
    args = (draw(2, 5, dtype=torch.float32), torch.full((2,), -100))
    step = run_program(capture(model, args), model, args, {})
    assert step.outputs[0].isnan() and F.cross_entropy(*args).isnan()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_probabilities_and_nll(reduction: str) -> None:
    """Targets that are probabilities, with and without smoothing and weights; ``nll_loss`` with weights."""
    target, weight = draw(4, 5, 3).softmax(1), draw(5).abs()
    compare(lambda x, y: F.cross_entropy(x, y, reduction=reduction), draw(4, 5, 3), target)
    compare(lambda x, y: F.cross_entropy(x, y, weight, None, -100, None, reduction, 0.2), draw(4, 5, 3), target)
    labels = classes(4, 3, ignored=-100)
    compare(lambda x, y: F.nll_loss(F.log_softmax(x, 1), y, weight, reduction=reduction), draw(4, 5, 3), labels)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax_spellings(dim: int) -> None:
    """``softmax`` and ``log_softmax`` as functions, methods and modules, with a dtype, on any dim."""

    def run(x: Tensor) -> Tensor:
        y = F.softmax(x, dim) + x.softmax(dim=dim) * torch.softmax(x, dim, torch.float32).double()
        y = y + nn.Softmax(dim)(x) * x.log_softmax(dim) + F.log_softmax(x, dim=dim, dtype=torch.float64)
        return y * torch.special.log_softmax(x, dim) - F.softmin(x, dim)

    compare(run, draw(3, 4, 2), near=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_floats(dtype: torch.dtype) -> None:
    """In 16 bit floats sums over many classes are done in float32, and results come back in the input's dtype."""
    x, y = draw(3, 4000, dtype=dtype), classes(3, high=4000)
    for function in (F.cross_entropy, lambda x, y: x.softmax(-1)[:, :3], lambda x, y: x.log_softmax(-1)[:, :3]):
        model = Call(function, dtype)
        program = capture(model, (x, y))
        step, exact = run_program(program, model, (x, y), {}), function(x.double() * 1.5, y)
        assert step.outputs[0].dtype == dtype
        torch.testing.assert_close(step.outputs[0].double(), exact, rtol=2e-2, atol=1e-4)


def test_merged_rows() -> None:
    """A loss on merged rows is taken on the dims before the merge, so that batch and sequence stay in sight."""

    def run(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x[:, :-1].reshape(-1, 5).float(), y[:, 1:].reshape(-1))

    program = compare(run, draw(3, 4, 5, dtype=torch.float32), classes(3, 4), near=1e-5)
    assert not [node for node in program.ops() if "view" in str(node.target)]


def test_other_losses_and_statistics() -> None:
    """Losses and statistics that ATen keeps whole are written as sums too."""

    def run(x: Tensor, y: Tensor) -> Tensor:
        z = F.mse_loss(x, y) + F.smooth_l1_loss(x, y, reduction="sum") + F.huber_loss(x, y) + F.l1_loss(x, y)
        z = z + F.binary_cross_entropy(x.sigmoid(), y.sigmoid()) + F.binary_cross_entropy_with_logits(x, y.sigmoid())
        z = z + x.mean() + x.mean(0).sum() + x.mean([0, -1], keepdim=True).sum() + x.var() + x.std(1).sum()
        z = z + x.var(0, unbiased=False).sum() + torch.var_mean(x, [0, 1], correction=2)[0].sum() + x.logsumexp(1).sum()
        return (
            z
            + x.norm()
            + torch.linalg.vector_norm(x, dim=1).sum()
            + F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean")
        )

    compare(run, draw(3, 4, 2), draw(3, 4, 2) + 0.5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_weights_that_torch_does_not_hand_over(reduction: str) -> None:
    """``F.l1_loss`` leaves its weights out when it hands itself over to be traced."""

    def run(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        by_name = F.l1_loss(x, y, weight=weight, reduction=reduction)
        return by_name, F.l1_loss(x, y, None, None, reduction, weight), F.mse_loss(x, y, weight=weight)

    compare(run, draw(3, 4), draw(3, 4) + 0.5, draw(3, 4).abs() + 1)
