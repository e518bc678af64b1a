"""The flow from a program to its plan, one pass after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from autopar.mesh import Mesh
from autopar.plans import Cost, Options, Plan, remember_tracer

from .annotate import annotate
from .apply_constraints import apply_constraints
from .cost.fusion import mark_traffic
from .emit_plan import emit_plan
from .fit_memory import fit_memory
from .fold import fold, no_fold
from .frontier import trace_frontier
from .name_roles import name_roles
from .predict_memory import predict_memory
from .program import Program
from .solve.decide import Decided, decide
from .solve.hiding import NO_HIDING
from .solve.layout_graph import Prices
from .solve.problem import Problem, build_problem
from .solve.repeat_loops import repeat_loops


def make_plan(
    program: Program,
    mesh: Mesh,
    options: Options | None = None,
    *,
    folded: bool = True,
    reduced: bool = True,
    loops: bool = False,
    price: Callable[[Decided], Cost] | None = None,
) -> Plan:
    """Return the optimal plan of a program on a mesh. Deterministic: the same question gives the same bytes.

    Args:
        program: captured; annotated here if it is not yet.
        mesh: where it shall run.
        options: budget, constraints, optimizer, inputs and outputs.
        folded: repeated blocks share their decisions.
        reduced: dominated strategies are left out before the solver sees them; never changes the optimum.
        loops: count the seconds of a program of a micro-batch for all micro-batches, instead of for one.
        price: prices a decision, where a step is not what runs on one rank, one op after the other.

    Raises:
        InfeasibleError: no plan fits the memory budget; it names the least one that has a plan.
        ConstraintError: a constraint that matches nothing or can't be met.
        MeshError: an unknown device or link profile.
    """
    options = options or Options()
    prices = Prices.of(mesh)
    if any("rule" not in node.meta for node in program.ops()):
        annotate(program)
    roles = name_roles(program)
    constraints = apply_constraints(program, mesh, options.constraints, roles)
    repeated = fold(program, constraints.key)
    for node in program.ops():
        node.meta.pop("traffic", None)
    if prices.device.fuses:
        mark_traffic(program, repeated.class_of)
    folding = repeated if folded else no_fold(program)
    problem = build_problem(
        program, prices, options, folding, constraints=constraints, drop_dominated=reduced, repeated=repeated
    )
    problem = repeat_loops(problem, program) if loops else problem

    def solve(budget: int | None) -> Plan:
        decided, overlap = _decide(replace(problem, budget=budget), options, reduced)
        asked = msgspec.structs.replace(options, overlap=overlap)
        plan = predict_memory(program, emit_plan(program, mesh, asked, decided, roles=roles))
        return plan if price is None else msgspec.structs.replace(plan, cost=price(decided))

    budget = options.memory
    plan = solve(budget) if budget is None or not options.at_once else fit_memory(solve, budget)

    def within(budget: int | None) -> Plan:
        asked = msgspec.structs.replace(options, memory=budget)
        return make_plan(program, mesh, asked, folded=folded, reduced=reduced)

    remember_tracer(plan, lambda points: trace_frontier(within, points))
    return plan


def _decide(problem: Problem, options: Options, reduced: bool) -> tuple[Decided, bool]:
    """Return the optimal decision, and whether it is that by prices of what hides.

    Where nobody says, it is if that is proved at little cost: a plan that is proved by higher prices is worth more than
    one that may be anywhere.
    """
    if options.overlap is not None or not problem.hiding.num_groups:
        return decide(problem, dominate=reduced), bool(options.overlap)
    decided = decide(problem, dominate=reduced, quick=True)
    if decided.answer.status == "optimal":
        return decided, True
    return decide(replace(problem, hiding=NO_HIDING), dominate=reduced), False
