"""Verification: right plans pass, wrong ones are named to the op."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from autopar.errors import InputError, MismatchError
from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.complete_plan import complete_plan
from autopar.passes.cost.memory import KNOWN
from autopar.passes.program import Program
from autopar.passes.rules.rule import LocalCall
from autopar.plans import Plan
from autopar.runtime.locate_mismatch import Tolerance
from autopar.runtime.verify_ranks import make_optimizer, verify_ranks
from tests.passes.tiny_program import tiny_program


class Tiny(nn.Module):
    """The module of ``tiny_program``."""

    def __init__(self, width: int = 5, out: int = 7, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(width, out, bias=False, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.up(x)).sum()


def plan_of(program: Program, **choices: str) -> Plan:
    """Return a plan on two ranks; ops that are not named are replicated."""
    return complete_plan(program, Mesh((2,)), {f"{name}_default": (c,) for name, c in choices.items()}, {})


def batch(rows: int = 6) -> tuple[torch.Tensor]:
    """Return example inputs."""
    return (torch.randn(rows, 5, generator=torch.Generator().manual_seed(1)),)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw"])
def test_a_right_plan_passes(optimizer: str) -> None:
    """Split by a reduction and by the batch, the plan computes what the module does; the module stays as it was."""
    program, model = tiny_program(), Tiny()
    before = model.up.weight.detach().clone()
    result = verify_ranks(model, program, plan_of(program, contract="i", relu="b"), batch(), optimizer=optimizer)
    assert [moved.kind for moved in result.moved] == ["reduce_scatter", "all_gather", "all_gather"]
    assert torch.equal(model.up.weight, before) and model.up.weight.grad is None


def test_the_first_wrong_op_is_named() -> None:
    """A partial sum does not pass through relu: the rule that says so is found out, and relu is named."""
    program = tiny_program()
    relu = program.nodes()["relu_default"]
    relu.meta["rule"] = dataclasses.replace(relu.meta["rule"], linear=((0,),))
    relu.meta.update(module="act", source="model.py:12: torch.relu(h)")
    plan = plan_of(program, contract="i", **{"relu": "partial(sum):0"})
    with pytest.raises(MismatchError) as caught:
        verify_ranks(Tiny(), program, plan, batch())
    text = str(caught.value)
    assert "the output [0] differs by" in text
    assert "first op that differs is relu_default (aten.relu.default) in act at model.py:12: torch.relu(h)" in text
    assert "split by (partial(sum):0), held as P" in text


def test_ranks_that_disagree_are_named() -> None:
    """A rewrite that gives each rank another value where all should hold the same is found at its op."""
    program = tiny_program()
    relu = program.nodes()["relu_default"]

    def offset(call: LocalCall) -> object:
        return call.emit(torch.ops.aten.add.Tensor, call.again(), call.pieces["b"].offset)

    relu.meta["rule"] = dataclasses.replace(relu.meta["rule"], localize=offset)
    with pytest.raises(MismatchError, match="first op that differs is relu_default"):
        verify_ranks(Tiny(), program, plan_of(program, relu="b"), batch())


def test_a_capture_that_differs_is_told_apart() -> None:
    """When every op agrees with the captured graph, the capture is to blame."""
    program = tiny_program()

    class Other(Tiny):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.up(x)).sum() * 2

    with pytest.raises(MismatchError, match="the capture differs"):
        verify_ranks(Other(), program, plan_of(program), batch())


def test_values_are_needed() -> None:
    """A model on meta can't be run."""
    program = tiny_program()
    with pytest.raises(InputError, match=r"up.weight is on meta.*to_empty"):
        verify_ranks(Tiny(device="meta"), program, plan_of(program), batch())


def test_tolerance_counts_what_is_not_a_number() -> None:
    """NaN equals NaN at the same place; anything else beside it is an infinite difference."""
    nan, tolerance = float("nan"), Tolerance(1e-6)
    assert tolerance.excess(torch.tensor([nan, 1.0]), torch.tensor([nan, 1.0])) is None
    assert tolerance.excess(torch.tensor([nan, 1.0]), torch.tensor([2.0, 1.0])) == float("inf")
    assert tolerance.excess(torch.tensor([2.0, 1.0]), torch.tensor([nan, 1.0])) == float("inf")
    infinity = float("inf")
    assert tolerance.excess(torch.tensor([infinity]), torch.tensor([infinity])) is None
    assert tolerance.excess(torch.tensor([infinity]), torch.tensor([-infinity])) == infinity
    assert tolerance.excess(torch.tensor([3]), torch.tensor([4])) == 1.0
    assert tolerance.excess(torch.tensor([100.0]), torch.tensor([100.0 + 5e-5])) is None


def test_adam_does_not_blow_up_rounding() -> None:
    """A gradient of nothing but rounding moves a parameter by next to nothing."""
    parameter = torch.zeros(1)
    parameter.grad = torch.tensor([1e-9])
    make_optimizer("adamw", [parameter]).step()
    assert abs(float(parameter)) < 1e-7


class Coarse(nn.Module):
    """A float64 layer whose product is taken in another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(5, 7, bias=False, dtype=torch.float64)
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.nn.functional.linear(x.to(self.dtype), self.up.weight.to(self.dtype)).double()).sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_coarsest_dtype_that_is_computed_in_counts(dtype: torch.dtype) -> None:
    """A sum split over ranks in a coarser dtype than the parameters' is right up to the rounding of that dtype."""
    model, args = Coarse(dtype), (batch()[0].double(),)
    program = annotate(capture(model, args))
    product = next(node for node in program.ops() if node.target is torch.ops.autopar.contract.default)
    reduction = next(factor.name for factor in product.meta["rule"].factors if factor.kind == "sum")
    choices = {node.name: (reduction if node is product else "replicate",) for node in program.ops()}
    plan = complete_plan(program, Mesh((2,)), choices, {})
    found = verify_ranks(model, program, plan, args).values[0]
    expected = model(*args).detach()
    assert found is not None
    assert abs(found - expected) > 1e-9 * abs(expected), "the sum was not split, or not in the coarser dtype"


@pytest.mark.parametrize("name", [*sorted(KNOWN), "mine{moments=3}"])
def test_every_optimizer_has_a_step_that_does_not_look_beyond_an_element(name: str) -> None:
    """The step that is compared moves the halves of a parameter as it moves the whole."""
    whole, slope = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)

    def step(part: slice) -> torch.Tensor:
        moved = whole[part].clone()
        moved.grad = slope[part].clone()
        make_optimizer(name, [moved]).step()
        return moved

    together = step(slice(0, 6))
    assert not torch.equal(together, whole)
    assert torch.equal(torch.cat([step(slice(0, 3)), step(slice(3, 6))]), together)
