"""What a plan tells people: filled from the program, without a change to what the plan decides."""

from __future__ import annotations

import msgspec
import pytest

from autopar.mesh import Mesh
from autopar.passes.collectives_of import collectives_of
from autopar.passes.complete_plan import complete_plan
from autopar.passes.describe_plan import describe_plan
from autopar.passes.lower import lower
from autopar.placement import parse_layout
from autopar.plans import Plan
from tests.passes.test_lower import COLUMN, DATA
from tests.passes.tiny_program import tiny_program


def _plan(choices: dict[str, tuple[str, ...]], weight: str, sizes: tuple[int, ...]) -> Plan:
    return complete_plan(tiny_program(), Mesh(sizes), choices, {"up.weight": parse_layout(weight)})


def test_the_fields_for_reports_are_filled() -> None:
    """Modules, phases, placeholders, gradients and shapes come from the program."""
    plan = _plan(DATA, "R", (2,))
    assert plan.modules["contract_default"] == "up"
    assert plan.roles["contract_default"] == ("batch",) and plan.roles["contract_default_1"] == ("batch",)
    assert (plan.phases["contract_default"], plan.phases["contract_default_1"]) == ("forward", "backward")
    assert plan.placeholders == {"up.weight": "w", "args[0]": "x"}
    assert plan.gradients == {"up.weight": "contract_default_1"}
    assert plan.parameter_shapes == {"up.weight": (7, 5)}


def test_nothing_that_is_decided_changes() -> None:
    """Describing a described plan gives the same plan, and a bare one is told like one that never was."""
    plan = _plan(dict.fromkeys(DATA, ("b", "o")), "S0,S0", (2, 2))
    bare = msgspec.structs.replace(
        plan, modules={}, phases={}, roles={}, placeholders={}, gradients={}, parameter_shapes={}
    )
    assert describe_plan(tiny_program(), plan) == describe_plan(tiny_program(), bare) == plan


def test_reasons_name_the_reader() -> None:
    """A gathered weight says which module wants it whole; a gradient says whose it is."""
    plan = _plan(DATA, "S0", (2,))
    reasons = {(row.kind, row.phase): row.reason for row in plan.collectives}
    assert reasons["all_gather", "forward"] == "gathered over axis0: wanted whole by up (batch)"
    (gradient,) = (row.reason for row in plan.collectives if row.tensor == plan.gradients["up.weight"])
    assert gradient.startswith("summed") and gradient.endswith("by the gradient of up.weight")
    assert reasons["all_reduce", "forward"] == "summed over axis0: wanted whole by the output [0]"


@pytest.mark.parametrize(
    ("choices", "weight", "sizes"),
    [(DATA, "S1", (3,)), (COLUMN, "R", (2,)), (dict.fromkeys(DATA, ("b", "o")), "S1,S1", (2, 2))],
)
def test_a_plan_and_its_program_give_the_same_reasons(
    choices: dict[str, tuple[str, ...]], weight: str, sizes: tuple[int, ...]
) -> None:
    """What the plan says about a collective is what the lowered graph says about it."""
    plan = _plan(choices, weight, sizes)
    rows = collectives_of(lower(tiny_program(), plan, (0,) * len(sizes)))
    assert sorted((row.kind, row.axis, row.tensor, row.phase, row.reason) for row in rows) == sorted(
        (row.kind, row.axis, row.tensor, row.phase, row.reason) for row in plan.collectives
    )
