"""Repeated blocks are found, tied, and priced as the unfolded program."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.cost.price_program import price_program
from autopar.passes.fold import find_runs, fold, no_fold
from autopar.passes.lower import lower
from autopar.passes.pipeline import make_plan
from autopar.passes.program import Program
from autopar.plans import Options
from benchmarks.models.llama import LlamaConfig, build


def small_llama(layers: int) -> Program:
    """Return an annotated Llama of real proportions but few heads."""
    config = LlamaConfig(hidden=2048, ffn=8192, heads=16, kv_heads=4, layers=layers, vocab=32000, sequence=2048)
    return annotate(capture(*build(config, 16), {}))


def test_runs_are_maximal_and_disjoint() -> None:
    """Two blocks of different periods are found with their full length."""
    ids = np.array([9, *[1, 2, 3] * 4, 8, *[4, 5, 6, 7] * 3, 1])
    assert find_runs(ids, min_period=3) == [(1, 12, 3), (14, 12, 4)]


def test_short_periods_are_left_alone() -> None:
    """A block of fewer ops than the least period ties as a multiple of itself, or not at all."""
    assert find_runs(np.array([1, 2, 3] * 3)) == []
    assert find_runs(np.array([1, 2, 3] * 8)) == [(0, 24, 12)]


def test_depth_does_not_grow_the_number_of_decisions() -> None:
    """Six layers fold into as many classes as four; nothing is tied when folding is off."""
    four, six = small_llama(4), small_llama(6)
    assert len(set(fold(four).class_of.values())) == len(set(fold(six).class_of.values()))
    assert len(set(no_fold(four).class_of.values())) == len(no_fold(four).class_of)


def test_an_extra_key_unties() -> None:
    """A node for which something else was asked decides alone."""
    program = small_llama(4)
    free = fold(program).class_of
    name = next(name for name in free if free[name] != name)
    asked = fold(program, lambda node: node == name)
    assert asked.class_of[name] == name


@pytest.mark.parametrize(("sizes", "overlap"), [((4,), False), ((2, 2), False), ((4,), True)])
def test_the_folded_optimum_is_the_unfolded_one(sizes: tuple[int, ...], overlap: bool) -> None:
    """Ties cost nothing here, nothing is dropped: both objectives, and the price of the lowered graph, agree."""
    program = small_llama(2)
    mesh = Mesh(sizes, device="h100", links=("infiniband_ndr", "nvlink4")[-len(sizes) :])
    options = Options(overlap=overlap)
    folded, unfolded = make_plan(program, mesh, options), make_plan(program, mesh, options, folded=False)
    assert folded.solver.regions == 2 and folded.solver.variables < unfolded.solver.variables
    assert math.isclose(folded.solver.objective_s, unfolded.solver.objective_s, rel_tol=1e-6)
    for plan in (folded, unfolded):
        priced = price_program(program, plan, lower(program, plan, (0,) * len(sizes), improved=False))
        assert math.isclose(priced.step_seconds, plan.cost.step_seconds, rel_tol=1e-9)
        assert math.isclose(priced.communication_seconds, plan.cost.communication_seconds, rel_tol=1e-9)
        assert math.isclose(priced.hidden_seconds, plan.cost.hidden_seconds, rel_tol=1e-9)
        assert (plan.cost.hidden_seconds > 0) == overlap
