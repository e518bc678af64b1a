"""The plans that the step benchmark runs: autopar's own, and each peer's strategy asked by constraints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.complete_plan import complete_plan
from autopar.passes.name_roles import name_roles
from autopar.passes.pipeline import make_plan
from autopar.passes.pipeline_plan import plan_program
from autopar.passes.program import Program
from autopar.passes.rules.rule import Rule
from autopar.placement import Layout, parse_layout
from autopar.plans import Options, Plan
from benchmarks.recipes import RECIPES, recipe_constraints
from benchmarks.speed_cases import Case
from benchmarks.speed_peers import FSDP2, FSDP2_TENSOR, PEERS, RECIPE_OF, TENSOR, NoRoom
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
    own = make_plan(program, _mesh((ranks,), profile), Options(overlap=None))  # as autopar.plan does by default
    plans, refused = {OWN: own}, {}
    for peer in PEERS if ranks > 1 else ():
        if peer == FSDP2_TENSOR and (ranks < 4 or ranks % 2):
            continue
        sizes = (ranks // 2, 2) if peer == FSDP2_TENSOR else (ranks,)
        mesh = _mesh(sizes, profile)
        recipe = next(recipe for recipe in RECIPES if recipe.title == RECIPE_OF[peer])
        try:
            options = Options(constraints=recipe_constraints(program, mesh, recipe))
            made = make_plan(program, mesh, options)
            plans[peer] = made if peer == TENSOR else _as_the_peer(program, made, peer)
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


def _as_the_peer(program: Program, made: Plan, peer: str) -> Plan:
    """Return the plan with its backward as the peer's: constraints bind the forward, and the solver may do better.

    Under data parallelism every op of the backward is split over the batch; FSDP2 gathers parameters once more instead
    of keeping them.
    """
    parameters = {role.node for role in program.inputs if role.kind == "parameter"}
    gathers_again = peer in (FSDP2, FSDP2_TENSOR)

    def pick_saved(tensor: str, had: Sequence[Layout]) -> Sequence[Layout]:
        return had[:1] if tensor in parameters and gathers_again else had

    choices = dict(made.choices)
    if made.mesh.num_axes == 1:
        roles = name_roles(program)
        for node in program.ops():
            if node.meta["phase"] == "backward":
                choices[node.name] = _over_batch(node, roles.get(node.name, {}), made) or choices[node.name]
    layouts = {name: parse_layout(text) for name, text in made.parameters.items()}
    return complete_plan(program, made.mesh, choices, layouts, options=made.options, pick_saved=pick_saved)


def _over_batch(node: fx.Node, roles: Mapping[str, str], made: Plan) -> tuple[str, ...] | None:
    """Return the choice that splits an op over the batch, if it has one."""
    rule: Rule = node.meta["rule"]
    names = {choice.name for choice in rule.choices()}
    for factor in rule.factors:
        whole = factor.size % made.mesh.num_ranks == 0
        if whole and roles.get(factor.name) == "batch" and factor.name in names:
            return (factor.name,)
    return None
