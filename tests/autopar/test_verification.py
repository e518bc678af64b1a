"""``autopar.verify`` as a user calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.complete_plan import complete_plan
from tests.models import mlp


def test_a_plan_is_verified_from_its_file(tmp_path: Path) -> None:
    """A saved plan of the planner's own passes; the model is untouched."""
    model, args, kwargs = mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = autopar.plan(model, (2,), args, kwargs)
    plan.save(tmp_path / "plan.json")
    autopar.verify(model, tmp_path / "plan.json", args, kwargs)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_plan_for_local_inputs_is_verified_on_a_global_batch() -> None:
    """With ``inputs="local"`` the example is a rank's share."""
    model, args, _ = mlp()
    plan = autopar.plan(model, (2,), args, inputs="local")
    autopar.verify(model, plan, args)


def test_a_loss_is_put_behind_the_model() -> None:
    """A plan made with a loss is verified with it."""
    model, x, y = nn.Linear(6, 5), torch.randn(4, 6), torch.tensor([0, 1, 2, 4])
    plan = autopar.plan(model, (2,), (x, y), loss=F.cross_entropy)
    autopar.verify(model, plan, (x, y), loss=F.cross_entropy)


def test_a_plan_for_another_model_is_refused() -> None:
    """The fingerprint tells before anything runs."""
    model, args, _ = mlp()
    other, _, _ = mlp(hidden=48)
    with pytest.raises(autopar.PlanError, match="plan again"):
        autopar.verify(other, autopar.plan(model, (2,), args), args)


def test_a_plan_that_moves_the_wrong_piece_is_refused() -> None:
    """A route that the plan does not have is an error, not another number."""
    model, args, _ = mlp()
    program = annotate(capture(model, args))
    plan = complete_plan(program, autopar.Mesh((2,)), {}, {"up.weight": (0,)})
    autopar.verify(model, plan, args)
    with pytest.raises(autopar.LoweringError, match="routes do not lead to"):
        autopar.verify(model, msgspec.structs.replace(plan, routes=()), args)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rtol": float("nan")}, "rtol=nan is no tolerance"),
        ({"rtol": float("inf")}, "no tolerance"),
        ({"rtol": 0}, "no tolerance"),
        ({"rtol": -1.0}, "no tolerance"),
        ({"rtol": "1e-3"}, "no tolerance"),
        ({"optimizer": "shampoo"}, "use one of 'adafactor'"),
        ({"plan": 3}, "plan= takes"),
        ({"plan": None}, "plan= takes"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    """A tolerance that every difference would pass, an unknown optimizer, a plan that is none."""
    model, args, _ = mlp()
    plan = options.pop("plan", autopar.plan(model, (2,), args))
    with pytest.raises(autopar.OptionError, match=words):
        autopar.verify(model, plan, args, **options)
