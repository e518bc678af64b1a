"""Any legal choice becomes a full plan."""

from __future__ import annotations

import pytest

from autopar.errors import LoweringError, PlanError
from autopar.mesh import Mesh
from autopar.passes.complete_plan import complete_plan
from autopar.plans import Options, Plan
from tests.passes.tiny_program import tiny_program


def routes_of(plan: Plan) -> dict[tuple[str, str], tuple[tuple[str, str], ...]]:
    """Return the arcs by tensor and phase."""
    return {(route.tensor, route.phase): route.arcs for route in plan.routes}


def test_what_is_not_said_is_replicated_and_moves_nothing() -> None:
    """The empty choice is one device, many times."""
    plan = complete_plan(tiny_program(), Mesh((2, 2)), {}, {})
    assert plan.routes == () and plan.collectives == ()
    assert set(plan.choices.values()) == {("replicate", "replicate")}
    assert plan.saved == {"relu_default": ("R,R",)}


def test_ways_start_from_the_nearest_layout_that_is_there() -> None:
    """Wanted whole and then in rows, a tensor is reduced once and cut for nothing."""
    program = tiny_program()
    choices = {"contract_default": ("i",), "relu_default": ("replicate",)}
    plan = complete_plan(program, Mesh((2,)), choices, {"up.weight": (1,)})
    assert routes_of(plan)["contract_default", "forward"] == (("P", "R"),)
    assert routes_of(plan)["x", "forward"] == (("R", "S1"),)
    assert routes_of(plan)["contract_default_1", "backward"] == (("R", "S1"),)


def test_the_price_decides_the_way() -> None:
    """When an all-reduce is cheap and a scatter dear, a partial sum goes the long way."""
    program = tiny_program(out=8)
    choices = {"contract_default": ("i",), "relu_default": ("b",)}
    by_bytes = complete_plan(program, Mesh((2,)), choices, {})
    assert routes_of(by_bytes)["contract_default", "forward"] == (("P", "S0"),)
    prices = {"reduce_scatter": 9.0}
    dear = complete_plan(program, Mesh((2,)), choices, {}, price=lambda tensor, arc: prices.get(arc.kind, 1.0))
    assert routes_of(dear)["contract_default", "forward"] == (("P", "R"), ("R", "S0"))


def test_copies_are_saved_as_told() -> None:
    """A gathered copy may be kept, even of a parameter; by default the producer's layout is."""
    program = tiny_program()
    choices = {"relu_default": ("b",), "threshold_backward_default": ("replicate",)}
    plain = complete_plan(program, Mesh((2,)), choices, {})
    assert plain.saved["relu_default"] == ("S0",)
    kept = complete_plan(program, Mesh((2,)), choices, {}, pick_saved=lambda name, had: had[-1:])
    assert kept.saved["relu_default"] == ("R",)
    assert ("relu_default", "backward") not in routes_of(kept)


def test_outputs_and_inputs_follow_the_options() -> None:
    """A loss lies whole; a lying output stays where it is, but complete; local inputs rest in rows."""
    program = tiny_program()
    choices = {"sum_default": ("b",)}
    assert complete_plan(program, Mesh((2,)), choices, {}, options=Options(outputs="lie")).outputs == {"[0]": "R"}
    local = complete_plan(program, Mesh((2,)), {}, {}, options=Options(inputs="local"))
    assert local.inputs == {"args[0]": "S0"}


def test_impossible_wishes_are_named() -> None:
    """Unknown parameters, illegal choices and partial values that nobody produces."""
    program, mesh = tiny_program(), Mesh((2,))
    with pytest.raises(PlanError, match=r"down.weight is no parameter of the program; it has up\.weight"):
        complete_plan(program, mesh, {}, {"down.weight": (0,)})
    with pytest.raises(LoweringError, match="empty piece"):
        complete_plan(program, Mesh((4,)), {"contract_default": ("b",)}, {})
    with pytest.raises(LoweringError, match="can't go from R to P"):
        complete_plan(program, mesh, {"sum_default": ("partial(sum):0",)}, {})
