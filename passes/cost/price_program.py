"""Price a lowered program by the planner's arithmetic, on the tensors that really move and the ops that really run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.mesh import Mesh
from autopar.placement import Layout, local_shape
from autopar.plans import Cost, Plan

from ..find_hideable import find_bucketed, find_hideable
from ..insert_collectives import COLLECTIVES
from ..local_program import LocalProgram
from ..plan_choices import choices_of
from ..program import Program, result_values, tensor_operands, tensors_of
from ..redistribution import Arc, arc_between
from ..rules.legality import operand_layouts, result_layouts
from .collectives import Company, bucketed_seconds
from .compute import compute_dtype, local_lengths, local_seconds, numbers_drawn
from .devices import device, mesh_links
from .fusion import ALONE, Traffic


def price_program(program: Program, plan: Plan, local: LocalProgram) -> Cost:
    """Return the seconds of a step of one rank's program; rank 0 is the fullest, whose seconds a plan predicts.

    Args:
        program: the annotated program that was lowered, for its ops and their flops.
        plan: the plan that it was lowered by, for operands that a local rewrite does not read (only their shape).
        local: its lowering, with its mesh.
    """
    bucketed = find_bucketed(program, plan.options.disable)
    travel = {node: _arc_seconds(node, local.mesh, bucketed) for node in local.joint.graph.nodes if _ends_arc(node)}
    communication = sum(travel.values())
    first, again = (_emitted(local, repeated) for repeated in (False, True))
    work = {node.name: _op_seconds(node, first, plan, local) for node in program.ops()}
    recomputed = set(plan.recomputed)
    for node in program.ops():
        if node.name in recomputed:
            work[node.name] += _op_seconds(node, again, plan, local)
    compute = sum(work.values())
    moved: dict[str, float] = defaultdict(float)
    for node, seconds in travel.items():
        moved[node.meta["tensor"]] += seconds
    contention = device(local.mesh.device).contention if plan.options.overlap else 1.0
    hidden = _hidden_seconds(program, work, moved, contention)
    return Cost(
        step_seconds=compute + communication - hidden,
        compute_seconds=compute,
        communication_seconds=communication,
        hidden_seconds=hidden,
    )


def _hidden_seconds(
    program: Program, work: Mapping[str, float], moved: Mapping[str, float], contention: float
) -> float:
    """Return what hides: in every region the lesser of its compute and what may hide behind it."""
    if contention >= 1.0:
        return 0.0
    found = find_hideable(program)
    computed: dict[int, float] = defaultdict(float)
    travels: dict[int, float] = defaultdict(float)
    for name, seconds in work.items():
        computed[found.regions[name]] += seconds
    for name, seconds in moved.items():
        if name in found.tensors:
            travels[found.regions[name]] += seconds * (1.0 - contention)
    return sum(min(computed[region], seconds) for region, seconds in travels.items())


def _emitted(local: LocalProgram, again: bool) -> dict[str, list[fx.Node]]:
    """Return the lowered nodes of every global one: those of its own phase, or those that compute it again."""
    out: dict[str, list[fx.Node]] = defaultdict(list)
    for node in local.joint.graph.nodes:
        is_op = node.op in ("call_function", "get_attr") and "arc" not in node.meta
        if is_op and bool(node.meta.get("again")) == again:
            out[node.meta["origin"]].append(node)
    return out


def _ends_arc(node: fx.Node) -> bool:
    """Tell whether a node is the last of those that carry out an arc: the one that holds the moved tensor."""
    return "arc" in node.meta and "layout" in node.meta


def _back(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that an arc ran, the last first, and then the node that it started from."""
    yield node
    for operand in node.all_input_nodes[:1]:
        if "layout" in operand.meta:
            yield operand
        else:
            yield from _back(operand)


def _arc_seconds(node: fx.Node, mesh: Mesh, bucketed: Mapping[str, Company]) -> float:
    *steps, start = _back(node)
    arc = arc_between(start.meta["layout"], node.meta["layout"])
    assert isinstance(arc, Arc) and arc.kind == node.meta["arc"]
    calls = [step for step in steps if step.target in COLLECTIVES]
    if not calls:
        return 0.0
    (handed,) = (call.args[0] for call in calls)
    assert isinstance(handed, fx.Node)
    value: torch.Tensor = handed.meta["val"]
    ends = arc.source[arc.axis], arc.target[arc.axis]
    num_bytes = float(value.numel() * value.element_size())
    link = mesh_links(mesh)[arc.axis]
    company = bucketed.get(node.meta["tensor"])
    ranks = mesh.sizes[arc.axis]
    seconds = bucketed_seconds(arc.kind, ranks, num_bytes, *ends, link, device(mesh.device), company=company)
    return float(seconds)


def _op_seconds(node: fx.Node, emitted: dict[str, list[fx.Node]], plan: Plan, local: LocalProgram) -> float:
    """Return the seconds of one global op, by the local tensors that its lowered nodes read and make."""
    group = [*emitted[node.name], *(made for user in node.users for made in emitted.get(user.name, ()))]
    inside = set(emitted[node.name])
    read: dict[str, list[fx.Node]] = defaultdict(list)
    for made in emitted[node.name]:
        for leaf in pytree.arg_tree_leaves(*made.args, **made.kwargs):
            if isinstance(leaf, fx.Node) and leaf not in inside and leaf not in read[leaf.meta.get("tensor", "")]:
                read[leaf.meta.get("tensor", "")].append(leaf)
    mesh = local.mesh
    before: list[torch.Tensor] = []
    demanded = operand_layouts(choices_of(node, plan.choices[node.name], mesh))
    for operand, layout in zip(tensor_operands(node), demanded):
        found = read[operand.name]
        if found:
            before.append(_value(found.pop(0) if len(found) > 1 else found[0]))
            continue
        before.append(_piece(_value(operand), layout, local))
    wanted = {node.name, *(user.name for user in node.users)}
    results = {made.meta["tensor"]: made for made in group if made.meta.get("tensor") in wanted}
    after = []
    choices = choices_of(node, plan.choices[node.name], mesh)
    for name, value, layout in zip(_result_names(node), tensors_of(node), result_layouts(choices)):
        after.append(_value(results[name]) if name in results else _piece(value, layout, local))
    rule = node.meta["rule"]
    traffic: Traffic = node.meta.get("traffic", ALONE)
    moved = [*before, *after]
    whole = [_value(operand) for operand in tensor_operands(node)] + tensors_of(node)
    lengths = local_lengths(rule, [tuple(value.shape) for value in moved], [tuple(value.shape) for value in whole])
    num_bytes = sum(
        value.numel() * value.element_size() * traffic.share(what, slot)
        for what, side in (("operands", before), ("results", after))
        for slot, value in enumerate(side)
    )
    dtype = compute_dtype(moved)
    how = {"launches": traffic.launches, "drawn": numbers_drawn(rule, tensors_of(node))}
    return local_seconds(node.target, rule, lengths, num_bytes, dtype, device(mesh.device), **how)


def _piece(value: torch.Tensor, layout: Layout, local: LocalProgram) -> torch.Tensor:
    shape = local_shape(value.shape, layout, local.mesh.sizes, local.coordinate)
    return torch.empty(shape, dtype=value.dtype, device="meta")


def _result_names(node: fx.Node) -> list[str]:
    if isinstance(node.meta["val"], torch.Tensor):
        return [node.name]
    by_index = {user.args[1]: user.name for user in node.users if user.op == "call_function"}
    return [str(by_index.get(index, "")) for index, _ in result_values(node)]


def _value(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value
