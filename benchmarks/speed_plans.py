"""The plans that the step benchmark runs: autopar's own, and each peer's strategy asked by constraints."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.complete_plan import complete_plan
from autopar.passes.pipeline import make_plan
from autopar.passes.pipeline_plan import plan_program
from autopar.passes.program import Program
from autopar.placement import Layout, parse_layout
from autopar.plans import Options, Plan
from benchmarks.recipes import RECIPES, recipe_constraints
from benchmarks.speed_cases import Case
from benchmarks.speed_peers import FSDP2, FSDP2_TENSOR, PEERS, RECIPE_OF, NoRoom
from benchmarks.speed_pipeline import PIPELINE, cuts, micro_batches

OWN = "autopar"


def speed_plans(case: Case, ranks: int, profile: str) -> tuple[dict[str, Plan], dict[str, str]]:
    """Return ``autopar`` and every peer's name -> plan, and for those that can't be had the reason.

    Args:
        case: the model.
        ranks: of the world.
        profile: name of a device profile, or the path of a measured one.
    """
    model, inputs = case.make_model(), case.make_inputs()
    program = annotate(capture(model, inputs, {}))
    plans, refused = {OWN: make_plan(program, _mesh((ranks,), profile))}, {}
    for peer in PEERS if ranks > 1 else ():
        if peer == FSDP2_TENSOR and (ranks < 4 or ranks % 2):
            continue
        sizes = (ranks // 2, 2) if peer == FSDP2_TENSOR else (ranks,)
        mesh = _mesh(sizes, profile)
        recipe = next(recipe for recipe in RECIPES if recipe.title == RECIPE_OF[peer])
        try:
            options = Options(constraints=recipe_constraints(program, mesh, recipe))
            made = make_plan(program, mesh, options)
            plans[peer] = _gathered_again(program, made) if peer in (FSDP2, FSDP2_TENSOR) else made
        except AutoparError as error:
            refused[peer] = f"{type(error).__name__}: {error}"
    if ranks > 1:
        try:
            plans[PIPELINE] = _in_stages(case, program, ranks, profile)
        except NoRoom:
            pass
        except AutoparError as error:
            refused[PIPELINE] = f"{type(error).__name__}: {error}"
    return plans, refused


def mesh_of(title: str, made: Plan, ranks: int) -> Mesh:
    """Return the mesh on which a plan runs: that of a plan in stages has an axis more."""
    return Mesh((ranks,), ("pp",), made.mesh.device) if title == PIPELINE else made.mesh


def _in_stages(case: Case, program: Program, ranks: int, profile: str) -> Plan:
    options = Options(schedule="1f1b", micro_batches=micro_batches(case, ranks), cuts=cuts(case, ranks))
    return plan_program(program, Mesh((ranks,), ("pp",), profile), options)


def _mesh(sizes: tuple[int, ...], profile: str) -> Mesh:
    names = ("data", "model")[: len(sizes)] if len(sizes) > 1 else ("ranks",)
    return Mesh(sizes, names, profile)


def _gathered_again(program: Program, made: Plan) -> Plan:
    """Return the plan with parameters gathered once more in the backward instead of kept, as FSDP2 does."""
    parameters = {role.node for role in program.inputs if role.kind == "parameter"}

    def pick_saved(tensor: str, had: Sequence[Layout]) -> Sequence[Layout]:
        return had[:1] if tensor in parameters else had

    layouts = {name: parse_layout(text) for name, text in made.parameters.items()}
    return complete_plan(program, made.mesh, made.choices, layouts, options=made.options, pick_saved=pick_saved)
