"""A model whose next call would compute something else is refused; one that only takes notes is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from autopar.errors import CaptureError
from autopar.passes.capture import capture

SHARED = {"scale": 1.0}


class Meter:
    """An object with a count in it."""

    def __init__(self) -> None:
        self.count = 0


class Stateful(nn.Module):
    """A layer, things to keep state in, and a function of all."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls, self.past, self.hidden, self.table = 0, [], None, {}  # type: ignore[var-annotated]
        self.meter, self.rng = Meter(), numpy.random.default_rng(0)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def counted(module: Any, x: Tensor) -> Tensor:
    module.calls += 1
    return module.layer(x) * min(1.0, module.calls / 3)  # the line


def metered(module: Any, x: Tensor) -> Tensor:
    module.meter.count += 1
    return module.layer(x) + module.meter.count  # the line


def remembered(module: Any, x: Tensor) -> Tensor:
    before = torch.zeros_like(x) if module.hidden is None else module.hidden
    module.hidden = module.layer(x + before).detach()  # the line
    return module.hidden * x


def listed(module: Any, x: Tensor) -> Tensor:
    module.past.append(module.layer(x).mean(0))
    return torch.stack(module.past).sum(0) * x  # the line


def shared(module: Any, x: Tensor) -> Tensor:
    SHARED["scale"] *= 0.5
    return module.layer(x) * SHARED["scale"]  # the line


def grown(module: Any, x: Tensor) -> tuple[Tensor, int]:
    module.calls += 1
    return module.layer(x), module.calls


@pytest.mark.parametrize("function", [counted, metered, remembered, listed, shared])
def test_state_in_python(function: Callable[[Any, Tensor], Any]) -> None:
    """The message names what changed and the line where the next call differs; the model is left as it was."""
    model = Stateful(function)
    with pytest.raises(CaptureError, match=r"keeps state in Python: a call changes .*something else at .*# the line"):
        capture(model, (torch.randn(3, 4),))
    assert (model.calls, model.past, model.hidden) == (0, [], None)


def test_state_that_is_returned() -> None:
    """An output that is no tensor differs too."""
    with pytest.raises(CaptureError, match="a call changes calls, so that the next call computes something else"):
        capture(Stateful(grown), (torch.randn(3, 4),))


def test_a_next_call_that_fails() -> None:
    """The second call's error is told."""

    def once(module: Any, x: Tensor) -> Tensor:
        module.past.append(0)
        if len(module.past) > 1:
            raise ValueError("only once")
        return module.layer(x)

    with pytest.raises(CaptureError, match=r"a call changes past, so that the next call fails \(ValueError: only once"):
        capture(Stateful(once), (torch.randn(3, 4),))


@pytest.mark.parametrize(
    ("draw", "what"),
    [
        (lambda m: random.random(), "draws numbers from random"),
        (lambda m: float(random.random() < 1e-9), "draws numbers from random"),
        (lambda m: float(numpy.random.rand()), r"draws numbers from numpy\.random"),
        (lambda m: float(m.rng.random()), "a call changes rng"),
    ],
)
def test_random_numbers_that_torch_does_not_draw(draw: Callable[[Any], float], what: str) -> None:
    """They would be the same in every step; the user's generators are left where they were."""
    model, before = Stateful(lambda m, x: m.layer(x) * (1 + draw(m))), random.getstate()
    with pytest.raises(CaptureError, match=what):
        capture(model, (torch.randn(3, 4),))
    assert random.getstate() == before


def test_a_generator_of_its_own() -> None:
    """A torch.Generator is an object that no program can carry on; the default one is what programs draw from."""
    own = torch.Generator()
    with pytest.raises(CaptureError, match=r"randn draws from a torch\.Generator of the model's own at .*the default"):
        capture(Stateful(lambda m, x: m.layer(x) + torch.randn(4, generator=own)), (torch.randn(3, 4),))
    capture(Stateful(lambda m, x: m.layer(x) + torch.randn(4, generator=torch.default_generator)), (torch.randn(3, 4),))


def noted(module: Any, x: Tensor) -> Tensor:
    module.calls += 1
    module.past.append(x.shape)
    module.hidden = module.layer(x)
    SHARED["scale"] += 1
    return module.hidden * 2


def cached(module: Any, x: Tensor) -> Tensor:
    if x.shape[0] not in module.table:
        module.table[x.shape[0]] = torch.arange(4.0).cos()
    return nn.functional.dropout(module.layer(x), 0.5) * module.table[x.shape[0]]


def seeded(module: Any, x: Tensor) -> Tensor:
    numpy.random.seed(3)
    return module.layer(x) * torch.from_numpy(numpy.random.rand(4)).float()


@pytest.mark.parametrize("function", [noted, cached, seeded])
def test_what_does_not_matter(function: Callable[[Any, Tensor], Any]) -> None:
    """Notes that nobody reads, tables made once, generators that are seeded in every call."""
    capture(Stateful(function), (torch.randn(3, 4),))
