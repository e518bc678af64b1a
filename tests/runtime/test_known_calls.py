"""Calls that are recognised have the signature that taking them apart gives; everything it depends on is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import InputError
from autopar.runtime import known_calls
from autopar.runtime.known_calls import KnownCalls
from autopar.runtime.signature import take_apart

CPU = torch.device("cpu")


@pytest.fixture
def module() -> nn.Module:
    """Return a module with a parameter, a buffer and a dropout."""
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))


def test_a_known_call_is_not_taken_apart_again(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call has the same signature, and its own leaves."""
    calls = KnownCalls(module)
    first = calls.take_apart((torch.ones(3, 2),), {"scale": 2.0}, CPU)
    assert first.signature == take_apart(module, (torch.ones(3, 2),), {"scale": 2.0}, CPU).signature
    monkeypatch.setattr(known_calls, "take_apart", None)
    x = torch.zeros(3, 2)
    second = calls.take_apart((x,), {"scale": 2.0}, CPU)
    assert second.signature == first.signature
    assert second.leaves[0] is x


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "shape": lambda m: (torch.ones(4, 2),),
    "dtype": lambda m: (torch.ones(3, 2).double(),),
    "gradient": lambda m: (torch.ones(3, 2, requires_grad=True),),
    "another constant": lambda m: (2,),
    "an equal constant of another type": lambda m: (True,),
    "mode of a part": lambda m: m[2].eval() and None,  # type: ignore[index]
    "frozen": lambda m: m[0].weight.requires_grad_(False) is None,  # type: ignore[index]
    "a part in another mode in place of one": lambda m: setattr(m, "2", nn.Dropout().eval()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(module: nn.Module, change: str) -> None:
    """What makes another signature is never taken for a known call."""
    calls = KnownCalls(module)
    args: tuple[Any, ...] = (1,) if "constant" in change else (torch.ones(3, 2),)
    before = calls.take_apart(args, {}, CPU).signature
    args = CHANGES[change](module) or args
    after = calls.take_apart(args, {}, CPU).signature
    assert after != before
    assert after == take_apart(module, args, {}, CPU).signature


def test_grad_mode_and_autocast_are_seen(module: nn.Module) -> None:
    """Both are not of the module or its inputs."""
    calls, x = KnownCalls(module), torch.ones(3, 2)
    seen = [calls.take_apart((x,), {}, CPU).signature]
    with torch.no_grad():
        seen.append(calls.take_apart((x,), {}, CPU).signature)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen.append(calls.take_apart((x,), {}, CPU).signature)
    assert len(set(seen)) == 3


def test_what_is_refused_stays_refused(module: nn.Module) -> None:
    """An input that no program takes is an error each time."""
    calls = KnownCalls(module)
    for _ in range(2):
        with pytest.raises(InputError, match="neither a tensor nor a plain constant"):
            calls.take_apart((object(),), {}, CPU)


def test_tensors_are_those_of_now(module: nn.Module) -> None:
    """A replaced parameter and a replaced part are seen; tied parameters come under all their names."""
    tied = nn.Sequential(module, module[0])  # type: ignore[index]
    calls = KnownCalls(tied)
    assert list(calls.parameters()) == [name for name, _ in tied.named_parameters(remove_duplicate=False)]
    assert calls.buffers() == dict(tied.named_buffers(remove_duplicate=False))
    fresh = nn.Parameter(torch.zeros(2, 2))
    module[0].weight = fresh  # type: ignore[index]
    assert calls.parameters()["0.0.weight"] is fresh and calls.parameters()["1.weight"] is fresh
    tied.add_module("1", nn.Linear(2, 2))
    calls.take_apart((torch.ones(3, 2),), {}, CPU)
    assert calls.parameters()["1.weight"] is tied.get_parameter("1.weight")
