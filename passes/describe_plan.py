"""Fill in what a plan says to people and lowering does not need: modules, phases, shapes, and why tensors move."""

from __future__ import annotations

from collections import defaultdict, deque

import msgspec

from autopar.passes.name_roles import FactorRoles, name_roles, split_names
from autopar.passes.plan_choices import choices_of
from autopar.passes.program import Program, tensor_operands
from autopar.passes.reasons import move_reason, reader_text
from autopar.passes.redistribution import arc_between
from autopar.passes.rules.legality import operand_layouts
from autopar.placement import Layout, parse_layout
from autopar.plans import CollectiveRow, Plan, Route

Readers = dict[tuple[str, str, Layout], str]
"""(tensor, phase, layout) -> who wants it so, the first reader in graph order."""


def describe_plan(program: Program, plan: Plan, roles: FactorRoles | None = None) -> Plan:
    """Return ``plan`` with the fields that only reports read; what it decides is unchanged.

    Args:
        program: the annotated program that the plan is for.
        roles: what a split of each factor is called, if that is known already.
    """
    names = split_names(program, plan.choices, name_roles(program) if roles is None else roles)
    plan = msgspec.structs.replace(plan, roles=names)
    nodes = program.nodes()
    stored = [role for role in program.inputs if role.kind in ("parameter", "buffer")]
    readers = _readers(program, plan)
    return msgspec.structs.replace(
        plan,
        modules={node.name: str(node.meta.get("module", "")) for node in program.ops()},
        phases={node.name: str(node.meta["phase"]) for node in program.ops()},
        placeholders={role.name: role.node for role in program.inputs if role.kind != "tangent"},
        gradients={
            program.input_of(result.of).name: result.node
            for result in program.outputs
            if result.kind == "gradient" and result.node is not None
        },
        parameter_shapes={role.name: tuple(nodes[role.node].meta["val"].shape) for role in stored},
        collectives=_with_reasons(plan, readers),
    )


def _readers(program: Program, plan: Plan) -> Readers:
    """Return who wants every tensor in which layout; what is kept for the backward counts as a reader of its own."""
    readers: Readers = {}
    for node in program.ops():
        layouts = operand_layouts(choices_of(node, plan.choices[node.name], plan.mesh))
        for operand, layout in zip(tensor_operands(node), layouts):
            readers.setdefault((operand.name, str(node.meta["phase"]), layout), reader_text(node, plan))
    for result in program.outputs:
        if result.node is None:
            continue
        if result.kind == "output":
            text, reader, phase = plan.outputs[result.name], f"the output {result.name}".rstrip(), "forward"
        else:
            of = program.input_of(result.of)
            text = (plan.inputs if of.kind == "input" else plan.parameters)[of.name]
            reader, phase = (
                (f"the gradient of {of.name}", "backward")
                if result.kind == "gradient"
                else (f"the new value of {of.name}", "forward")
            )
        readers.setdefault((result.node, phase, parse_layout(text)), reader)
    for tensor, texts in plan.saved.items():
        for text in texts:
            readers.setdefault((tensor, "forward", parse_layout(text)), "the backward, which keeps it")
    return readers


def _with_reasons(plan: Plan, readers: Readers) -> tuple[CollectiveRow, ...]:
    """Return the plan's collectives with reasons; a row meets the arcs of its tensor, kind and axis in order."""
    reasons: dict[tuple[str, str, str, int], deque[str]] = defaultdict(deque)
    for route in plan.routes:
        for key, reason in _route_reasons(plan, route, readers):
            reasons[key].append(reason)
    rows = []
    for row in plan.collectives:
        waiting = reasons[row.tensor, row.phase, row.kind, row.axis]
        rows.append(msgspec.structs.replace(row, reason=waiting.popleft() if waiting else row.reason))
    return tuple(rows)


def _route_reasons(plan: Plan, route: Route, readers: Readers) -> list[tuple[tuple[str, str, str, int], str]]:
    """Return a key and a reason for every arc of a route; an arc that only leads on has the reason of the next one."""
    wanted: dict[Layout, str] = {}
    out = []
    for source_text, target_text in reversed(route.arcs):
        source, target = parse_layout(source_text), parse_layout(target_text)
        arc = arc_between(source, target)
        assert arc is not None
        reader = readers.get((route.tensor, route.phase, target)) or wanted.get(target, "nobody")
        wanted[source] = reader
        out.append(((route.tensor, route.phase, arc.kind, arc.axis), move_reason(arc, plan.mesh, reader)))
    return out[::-1]
