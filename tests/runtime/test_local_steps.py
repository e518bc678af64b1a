"""Steps over pieces give the bits that steps over DTensors give, and leave the optimizer as they would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.placement import Layout
from autopar.runtime.groups import MeshGroups
from autopar.runtime.local_steps import ELEMENTWISE, step_locally
from autopar.runtime.state import as_dtensor, local_of, make_parameter

LAYOUTS: tuple[tuple[tuple[int, ...], Layout], ...] = (
    ((4, 3), (0, -1)),
    ((5,), (-1, -1)),
    ((2, 2), (1, 0)),
    ((3,), (0, -1)),
)


def parameters_of(groups: MeshGroups) -> list[nn.Parameter]:
    """Return parameters in several layouts, the same each time."""
    torch.manual_seed(0)
    return [make_parameter(torch.randn(shape), layout, groups, True) for shape, layout in LAYOUTS]


def give_gradients(parameters: list[nn.Parameter], groups: MeshGroups, turn: int) -> None:
    """Give every parameter a gradient that lies like it; the last one has none in the first steps."""
    torch.manual_seed(turn)
    for parameter, (shape, layout) in zip(parameters, LAYOUTS):
        gradient = as_dtensor(torch.randn(shape), layout, shape, groups)
        parameter.grad = None if parameter is parameters[-1] and turn < 2 else gradient


def train(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], groups: MeshGroups, turns: int = 4) -> None:
    """Take some steps."""
    for turn in range(turns):
        give_gradients(parameters, groups, turn)
        optimizer.step()


def state_of(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Return the state by parameter, DTensors as their pieces with the placements beside."""
    return [
        {
            key: (value.placements, local_of(value)) if isinstance(value, DTensor) else value
            for key, value in optimizer.state[parameter].items()
        }
        for parameter in parameters
    ]


def test_same_bits(groups: MeshGroups) -> None:
    """Every elementwise optimizer, in every implementation: parameters and state are those of steps over DTensors."""
    for kind in ELEMENTWISE:
        for how in ({}, {"foreach": True}, {"fused": True}):
            kwargs: dict[str, Any] = {"lr": 0.1, "momentum": 0.9} if kind is torch.optim.SGD else {"lr": 0.1}
            usual, local = parameters_of(groups), parameters_of(groups)
            try:
                first, second = kind(usual, **kwargs, **how), kind(local, **kwargs, **how)
            except TypeError:
                continue  # it has no such implementation
            step_locally(local)
            try:
                train(first, usual, groups)
            except (NotImplementedError, RuntimeError):
                continue  # DTensor has no rule for one of its operations
            train(second, local, groups)
            assert "step" in vars(second) and "step" not in vars(first)
            for a, b in zip(usual, local):
                assert torch.equal(local_of(a), local_of(b)), (kind, how)
            for left, right in zip(state_of(first, usual), state_of(second, local)):
                assert str(left) == str(right), (kind, how)
            assert all(isinstance(key, DTensor) for key in second.state)


def test_others_step_as_usual(groups: MeshGroups) -> None:
    """An optimizer that mixes elements, a subclass, and parameters of others keep their method."""

    class Own(torch.optim.SGD):
        pass

    for kind in (torch.optim.Adafactor, Own):
        parameters = parameters_of(groups)[1:2]
        step_locally(parameters)
        optimizer = kind(parameters, lr=0.1)
        parameters[0].grad = parameters[0].detach().clone()
        optimizer.step()
        assert "step" not in vars(optimizer)


class Watcher:
    """Notes what a hook sees."""

    def __init__(self) -> None:
        self.seen: list[type] = []

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Note the type of the first parameter."""
        self.seen.append(type(optimizer.param_groups[0]["params"][0]))


def test_nobody_sees_the_pieces(groups: MeshGroups) -> None:
    """Hooks and closures see DTensors; after an error inside the step all is as before; schedulers go on working."""
    parameters = parameters_of(groups)
    step_locally(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    train(optimizer, parameters, groups, 2)
    watcher = Watcher()
    handle = optimizer.register_step_pre_hook(watcher)
    optimizer.step()
    handle.remove()

    def closure() -> float:
        watcher(optimizer, (), {})
        return 0.0

    optimizer.step(closure)
    assert all(seen is not Tensor for seen in watcher.seen) and len(watcher.seen) == 2
    before = [group["params"] for group in optimizer.param_groups]
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    assert [group["params"] for group in optimizer.param_groups] == before
    assert all(parameter in optimizer.state for parameter in parameters[:3])
    assert all(local_of(parameter).grad is None for parameter in parameters)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_versions_count(groups: MeshGroups) -> None:
    """A step over the pieces is a change of the parameters that got gradients."""
    parameters = parameters_of(groups)
    step_locally(parameters)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    train(optimizer, parameters, groups, 1)
    before = [parameter._version for parameter in parameters]
    optimizer.step()
    changed = [parameter._version > version for parameter, version in zip(parameters, before)]
    assert changed == [True, True, True, False]


def test_gradients_that_lie_elsewhere(groups: MeshGroups) -> None:
    """A gradient in another layout than its parameter's goes the usual way, whose numbers are right."""
    parameters = parameters_of(groups)[:1]
    step_locally(parameters)
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    shape = LAYOUTS[0][0]
    for _ in range(2):
        before = local_of(parameters[0]).clone()
        parameters[0].grad = as_dtensor(torch.ones(shape), (-1, -1), shape, groups)
        optimizer.step()
        assert torch.equal(local_of(parameters[0]), before - 1)
