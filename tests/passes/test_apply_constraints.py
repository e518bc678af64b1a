"""What is asked of modules, ops and parameters, and what becomes of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.errors import ConstraintError
from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.apply_constraints import apply_constraints
from autopar.passes.capture import capture
from autopar.passes.fold import fold
from autopar.passes.name_roles import name_roles
from autopar.passes.pipeline import make_plan
from autopar.passes.program import Program
from autopar.plans import Options

from .tiny_program import tiny_program

MESH = Mesh((2, 2), ("data", "model"))


class Stack(nn.Module):
    """Two equal pairs of layers, the loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a scalar."""
        for layer in self.layers:
            x = x + layer(x)
        return (x * self.scale).square().mean()


@pytest.fixture(scope="module")
def program() -> Program:
    """Return the annotated program of the stack on eight rows."""
    return annotate(capture(Stack(), (torch.randn(8, 8),), {}))


def planned(program: Program, constraints: dict[str, str]) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Return where parameters rest and what the forward's splits are called, without the axis' own words."""
    plan = make_plan(program, MESH, Options(constraints=constraints))
    return plan.parameters, {name: roles for name, roles in plan.roles.items() if plan.phases[name] == "forward"}


def test_several_demands_stand_in_one_text(program: Program) -> None:
    """Semicolons join demands on ops and parameters; a star takes in what belongs to no module."""
    parameters, roles = planned(program, {"*": "zero0; batch@data; batch@model"})
    assert set(parameters.values()) == {"R,R"}
    root = [name for name in roles if name.startswith("add")]
    assert root and all(roles[name] == ("batch", "batch") for name in root)


def test_parameters_rest_split_wherever_they_can(program: Program) -> None:
    """``zero3@axis`` splits on that axis and leaves out what has one element; alone it asks for any axis."""
    over_data, _ = planned(program, {"*": "zero3@data"})
    assert over_data.pop("scale") == "R,R"
    assert all(layout.startswith("S") for layout in over_data.values())
    anywhere, _ = planned(program, {"*": "zero3"})
    assert all("S" in layout for name, layout in anywhere.items() if name != "scale")


def test_zero0_on_one_axis_leaves_the_others_free(program: Program) -> None:
    """Whole on the first axis, split on the second by another pattern."""
    parameters, _ = planned(program, {"*": "zero0@data", "layers.*.weight": "zero3@model"})
    assert all(layout.startswith("R,") for layout in parameters.values())
    assert parameters["layers.0.0.weight"].startswith("R,S")


def test_an_op_is_named(program: Program) -> None:
    """``op:`` binds single ops, by a role or by a factor's name."""
    adds = [node.name for node in program.ops() if node.meta["module"] == "" and node.name.startswith("add")]
    _, roles = planned(program, {f"op:{adds[0]}": "replicate", f"op:{adds[1]}": "batch@model"})
    assert roles[adds[0]] == ("", "")
    assert roles[adds[1]][1] == "batch"


def test_equal_demands_by_different_patterns_fold(program: Program) -> None:
    """A demand's own pattern does not keep repeated blocks apart; its content does."""
    roles = name_roles(program)

    def keys(constraints: dict[str, str]) -> set[object]:
        found = apply_constraints(program, MESH, constraints, roles)
        return {found.key(name) for name in found.demands}

    alike = keys({"layers.0.0": "column@model", "layers.1.0": "column@model"})
    assert alike == keys({"layers.*.0": "column@model"})
    assert keys({"layers.0.0": "column@model", "layers.1.0": "column@data"}) > alike
    assert fold(program).class_of


@pytest.mark.parametrize(
    ("constraints", "words"),
    [
        ({"op:nothing": "batch"}, ["matches no op of the forward", "contract"]),
        ({"nothing.*": "zero3"}, ["matches no parameter", "up.weight"]),
        ({"up.weight": "zero3@axis9"}, ["unknown axis", "axis0"]),
        ({"up.weight": "zero3"}, ["split parameters over axis0", "leave it out"]),
        ({"up.weight": "zero0; S0"}, ["can't be met by up.weight"]),
        ({"up": "column; "}, ["''", "must name"]),
    ],
)
def test_a_bad_demand_is_refused(constraints: dict[str, str], words: list[str]) -> None:
    """The message says what was asked, what there is, and what can be done."""
    with pytest.raises(ConstraintError) as refused:
        make_plan(
            tiny_program(out=8),
            Mesh((16 if "zero3" in constraints.get("up.weight", "") else 2,)),
            Options(constraints=constraints),
        )
    assert all(word in str(refused.value) for word in words), str(refused.value)
