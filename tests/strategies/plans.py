"""Hypothesis strategies of meshes, layouts and legal plans."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import product

from hypothesis import strategies as st
from torch import fx

from autopar.mesh import Mesh
from autopar.passes.complete_plan import complete_plan
from autopar.passes.program import Program, is_getitem, result_values, tensor_operands
from autopar.passes.redistribution import layout_is_legal
from autopar.passes.rules.legality import legal, result_layouts
from autopar.passes.rules.rule import Choice, Rule
from autopar.placement import PARTIAL_SUM, REPLICATE, Layout, is_partial
from autopar.plans import Options, Plan

Pick = Callable[[int], int]
"""``pick(n)`` returns a number in ``range(n)``; 0 is the simplest choice."""

MESHES = ((2,), (3,), (4,), (2, 2), (5,), (6,), (2, 3), (3, 2), (8,), (2, 4), (1, 3), (2, 1))
"""Meshes of 2 to 8 ranks, the simplest first."""


def meshes(limit: int = 8) -> st.SearchStrategy[Mesh]:
    """Draw a mesh of one or two axes and at most ``limit`` ranks."""
    options = [Mesh(sizes) for sizes in MESHES]
    return st.sampled_from([mesh for mesh in options if mesh.num_ranks <= limit])


def legal_layouts(shape: Sequence[int], mesh: Mesh, partials: Sequence[int] = ()) -> list[Layout]:
    """Return every layout of a tensor without empty pieces; axes may also hold one of ``partials``."""
    codes = [REPLICATE, *range(len(shape)), *partials]
    per_axis = [codes if size > 1 else [REPLICATE] for size in mesh.sizes]
    layouts = [layout for layout in product(*per_axis) if layout_is_legal(shape, layout, mesh.sizes)]
    return [layout for layout in layouts if len({code for code in layout if code <= PARTIAL_SUM}) <= 1]


@st.composite
def plans(draw: st.DrawFn, program: Program, mesh: Mesh) -> Plan:
    """Draw a legal plan of a program: any choice of every op, any layout of every parameter, any copies saved."""
    return plan_by(program, mesh, lambda n: draw(st.integers(0, n - 1)) if n > 1 else 0)


def seeded_plan(program: Program, mesh: Mesh, seed: int) -> Plan:
    """Return a legal plan that a seed decides."""
    return plan_by(program, mesh, random.Random(seed).randrange)


def plan_by(program: Program, mesh: Mesh, pick: Pick) -> Plan:
    """Return the legal plan that ``pick`` decides."""
    layouts = {}
    for role in program.inputs:
        if role.kind == "parameter":
            options = legal_layouts(program.nodes()[role.node].meta["val"].shape, mesh)
            layouts[role.name] = options[pick(len(options))]

    def pick_saved(name: str, had: Sequence[Layout]) -> list[Layout]:
        return [had[pick(len(had))]]

    return complete_plan(
        program,
        mesh,
        choices_by(program, mesh, pick),
        layouts,
        options=Options(outputs=("auto", "full", "lie")[pick(3)], inputs=_inputs(program, mesh, pick)),
        pick_saved=pick_saved,
        recomputed=_recomputed(program, pick),
    )


def _recomputed(program: Program, pick: Pick) -> list[str]:
    """Return some forward ops to compute again: none, all, or any."""
    names = [node.name for node in program.ops() if node.meta["phase"] == "forward" and node.op == "call_function"]
    mode = pick(3)
    return [name for name in names if mode == 1 or (mode == 2 and pick(2))]


def _inputs(program: Program, mesh: Mesh, pick: Pick) -> str:
    """Return ``"local"`` only where every input can be cut along its first dim."""
    layout = (0 if mesh.sizes[0] > 1 else REPLICATE, *[REPLICATE] * (mesh.num_axes - 1))
    values = [program.nodes()[role.node].meta["val"] for role in program.inputs if role.kind == "input"]
    possible = mesh.sizes[0] > 1 and all(layout_is_legal(v.shape, layout, mesh.sizes) for v in values if v.dim())
    return ("global", "local")[pick(2)] if possible else "global"


def choices_by(program: Program, mesh: Mesh, pick: Pick) -> dict[str, tuple[str, ...]]:
    """Return a legal choice of every op; an operand is wanted partial only where its producer leaves it so."""
    produced: dict[str, Layout] = {}
    chosen = {}
    for node in program.ops():
        choices = _choose(node, mesh, produced, pick)
        chosen[node.name] = tuple(choice.name for choice in choices)
        layouts = dict(zip((index for index, _ in result_values(node)), result_layouts(choices)))
        produced[node.name] = layouts.get(0, ())
        for user in node.users:
            if is_getitem(user):
                produced[user.name] = layouts.get(user.args[1], ())  # type: ignore[arg-type]
    return chosen


def _choose(node: fx.Node, mesh: Mesh, produced: dict[str, Layout], pick: Pick) -> list[Choice]:
    rule: Rule = node.meta["rule"]
    operands = tensor_operands(node)
    shapes = [tuple(o.meta["val"].shape) for o in operands], [tuple(v.shape) for _, v in result_values(node)]
    replicate, *_ = everything = rule.choices()
    choices = [replicate] * mesh.num_axes
    for axis, size in enumerate(mesh.sizes):
        options = []
        for choice in everything if size > 1 else (replicate,):
            attempt = [*choices[:axis], choice, *choices[axis + 1 :]]
            there = all(
                not is_partial(code) or produced.get(operand.name, (REPLICATE,) * mesh.num_axes)[axis] == code
                for operand, code in zip(operands, choice.operands)
            )
            if there and legal(rule, attempt, *shapes, mesh) is None:
                options.append(choice)
        choices[axis] = options[pick(len(options))]
    return choices
