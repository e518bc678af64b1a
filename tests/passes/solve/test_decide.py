"""The ILP against brute force, with and without the memory bound."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.mesh import Mesh
from autopar.passes.pipeline import make_plan
from autopar.passes.program import Program
from autopar.plans import Options
from tests.passes.solve.oracle import Oracle
from tests.passes.solve.small_programs import small_programs
from tests.passes.tiny_program import tiny_program

LINKS = {1: [("nvlink4",), ("ethernet",)], 2: [("nvlink4", "nvlink4"), ("ethernet", "nvlink4")]}


def seconds(program: Program, mesh: Mesh, options: Options, reduced: bool) -> float:
    """Return the planned seconds, infinite when the planner refuses."""
    try:
        plan = make_plan(program, mesh, options, reduced=reduced)
    except InfeasibleError:
        return math.inf
    assert plan.solver.status == "optimal"
    assert options.memory is None or plan.memory.total_bytes <= options.memory
    return plan.cost.step_seconds


def close(a: float, b: float) -> bool:
    """Tell whether two optima agree."""
    return a == b or math.isclose(a, b, rel_tol=1e-6)


@given(st.data())
@settings(max_examples=settings.default.max_examples // 2)
def test_the_optimum_is_that_of_brute_force(data: st.DataObject) -> None:
    """On one axis of two or three ranks, for any small program and any budget, reduced or not."""
    program = data.draw(small_programs())
    mesh = Mesh((data.draw(st.sampled_from([2, 3])),), device="a100", links=data.draw(st.sampled_from(LINKS[1])))
    side = program.nodes()["w"].meta["val"].shape[0]
    unit = 4 * side * side
    memory = data.draw(st.sampled_from([None, 2 * unit, 3 * unit, 5 * unit, 8 * unit]))
    options = Options(memory=memory, optimizer="momentum", overlap=data.draw(st.booleans()))
    found = seconds(program, mesh, options, data.draw(st.booleans()))
    expected = Oracle(program, mesh, options).best_seconds()
    assert close(found, expected), (found, expected)


@given(st.data())
@settings(max_examples=settings.default.max_examples // 5)
def test_the_optimum_on_two_axes_is_that_of_brute_force(data: st.DataObject) -> None:
    """On a mesh of two by two with a slow and a fast link."""
    program = data.draw(small_programs(ops=2))
    mesh = Mesh((2, 2), device="a100", links=data.draw(st.sampled_from(LINKS[2])))
    side = program.nodes()["w"].meta["val"].shape[0]
    memory = data.draw(st.sampled_from([None, 4 * side * side * 3]))
    options = Options(memory=memory, optimizer="momentum", overlap=data.draw(st.booleans()))
    found = seconds(program, mesh, options, True)
    expected = Oracle(program, mesh, options).best_seconds()
    assert close(found, expected), (found, expected)


@pytest.mark.parametrize("sizes", [(2,), (3,)])
def test_the_least_budget_works_and_one_byte_less_is_refused(sizes: tuple[int, ...]) -> None:
    """The error names the least memory; it is the oracle's, it has a plan, and one byte less has none."""
    program, mesh = tiny_program(out=8), Mesh(sizes)
    with pytest.raises(InfeasibleError) as refused:
        make_plan(program, mesh, Options(memory=1))
    least = refused.value.least_bytes
    assert least == Oracle(program, mesh, Options()).least_bytes()
    assert str(least) in str(refused.value)
    assert make_plan(program, mesh, Options(memory=least)).memory.total_bytes == least
    with pytest.raises(InfeasibleError) as again:
        make_plan(program, mesh, Options(memory=least - 1))
    assert again.value.least_bytes == least
