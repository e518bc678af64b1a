"""Checks that can only raise are left out of the program; other looks at data are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.errors import CaptureError
from autopar.passes.capture import capture
from tests.verified import Around, verified_function


def asserted(x: Tensor) -> Tensor:
    """An assertion on a value."""
    assert torch.all(x.abs() < 1e6).item(), "too large"
    return x.square().sum()


def raised(x: Tensor) -> Tensor:
    """A branch that only raises."""
    if not x.isfinite().all() or (x > 1e6).any():
        message = "not finite"
        raise ValueError(message)
    return x.square().sum()


def counted(x: Tensor) -> Tensor:
    """A number that is only compared in an assertion."""
    assert (x > 0).sum().item() <= 24
    return x.square().sum()


def checked(x: Tensor) -> Tensor:
    """Torch's own check."""
    torch._check_tensor_all(x < 1e6)
    return x.square().sum()


@pytest.mark.parametrize("function", [asserted, raised, counted, checked])
def test_checks_are_taken_to_pass(function: Callable[[Tensor], Tensor]) -> None:
    """The numbers are those of a run that goes on."""
    verified_function(function)


def test_checks_inside_of_torch_are_taken_to_pass() -> None:
    """A loss that looks at its variances, and a distribution that looks at its arguments."""
    verified_function(lambda x: F.gaussian_nll_loss(x, x.detach() + 1, x.exp()))
    verified_function(lambda x: torch.distributions.Normal(x, x.exp()).log_prob(x.detach()).sum())


def branched(x: Tensor) -> Tensor:
    """A branch that computes."""
    if not x.isfinite().all():
        x = x.clamp(-1, 1)
    return x.square().sum()


def caught(x: Tensor) -> Tensor:
    """An assertion that decides what is computed."""
    try:
        assert (x > 0).all()
    except AssertionError:
        return x.sum()
    return x.square().sum()


def with_else(x: Tensor) -> Tensor:
    """A branch that raises on one side and goes on otherwise on the other, by a number that is used elsewhere."""
    largest = x.max().item()
    assert largest < 1e6
    return x.square().sum() * largest


@pytest.mark.parametrize("function", [branched, caught, with_else])
def test_other_branches_on_data_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    """The message names the line."""
    with pytest.raises(CaptureError, match=r"test_trace_checks.py:\d+: .*needs the value"):
        capture(Around(function), (torch.randn(4, 6, dtype=torch.float64),))
