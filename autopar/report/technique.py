"""Say in the trade's words what a plan does: column, row, batch, ZeRO-3, ..., read off its records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from autopar.placement import REPLICATE, code_name, parse_layout
from autopar.plan_records import PlanRecord
from autopar.report.fold_names import natural_key

_WEIGHTY = ("contract", "attention", "embedding", "convolution")
_OF_WEIGHTS = frozenset(("column", "row", "head", "vocab", "expert", "channel"))
_DATA_PARALLEL = "data parallel"


def wide_axes(plan: PlanRecord) -> list[int]:
    """Return the mesh axes that split anything: those of more than one rank."""
    return [axis for axis, size in enumerate(plan.mesh_record.sizes) if size > 1]


def node_role(plan: PlanRecord, node: str, axis: int) -> str:
    """Return what ``axis`` does to an op, in one word or two; empty if every rank of the axis does the same."""
    choice = plan.choices[node][axis]
    if choice == "replicate":
        return ""
    if choice.startswith("partial("):
        return "partial passed on"
    return _named_role(plan, node, axis) or f"split of {choice}"


def _named_role(plan: PlanRecord, node: str, axis: int) -> str:
    """Return the word for a split; empty where the plan has none but the factor's own name."""
    role, choice = plan.roles[node][axis] if node in plan.roles else "", plan.choices[node][axis]
    return "" if role == choice or choice.startswith("partial(") else role


def nodes_by_module(plan: PlanRecord) -> dict[str, list[str]]:
    """Return the op nodes of every module path, those that weigh most first, the forward before the backward."""
    out: dict[str, list[str]] = defaultdict(list)
    for node, module in plan.modules.items():
        if node in plan.choices:
            out[module].append(node)
    return {module: order_nodes(plan, nodes) for module, nodes in out.items()}


def order_nodes(plan: PlanRecord, nodes: Iterable[str]) -> list[str]:
    """Return op nodes with the forward ones first, then matmuls and their like, then by name."""
    return sorted(
        nodes,
        key=lambda node: (plan.phases.get(node) == "backward", not node.startswith(_WEIGHTY), natural_key(node)),
    )


def roles_on(plan: PlanRecord, nodes: Sequence[str], axis: int) -> list[str]:
    """Return the different roles of ``axis`` in ``nodes``; forward ops and named roles go first."""
    forward = [node for node in nodes if plan.phases.get(node) != "backward"] or list(nodes)
    named = dict.fromkeys(_named_role(plan, node, axis) for node in forward)
    roles = [role for role in named if role] or [node_role(plan, node, axis) for node in forward]
    return list(dict.fromkeys(role for role in roles if role))


def strategy_text(plan: PlanRecord, nodes: Sequence[str]) -> str:
    """Return what all axes do to some ops: ``batch over data, column over model``."""
    parts = []
    for axis in wide_axes(plan):
        roles = roles_on(plan, nodes, axis)
        if roles:
            parts.append(f"{' and '.join(roles)} over {plan.mesh_record.names[axis]}")
    return ", ".join(parts) or "replicated"


def module_strategies(plan: PlanRecord) -> dict[str, str]:
    """Return module path (or op node, where an op has none) -> the technique on each axis."""
    out = {}
    for module, nodes in nodes_by_module(plan).items():
        if module:
            out[module] = strategy_text(plan, nodes)
    for node in plan.choices:
        if not plan.modules.get(node):
            out[node] = strategy_text(plan, [node])
    return {name: out[name] for name in sorted(out, key=natural_key)}


def parameter_techniques(plan: PlanRecord) -> dict[str, tuple[str, ...]]:
    """Return full name of a parameter or buffer -> the technique on each mesh axis; empty where there is none."""
    by_module = nodes_by_module(plan)
    moved = {(row.tensor, row.kind, row.axis) for row in plan.collectives}
    axes = range(len(plan.mesh_record.sizes))
    return {
        name: tuple(_parameter_technique(plan, name, axis, by_module, moved) for axis in axes)
        for name in plan.parameters
    }


def _parameter_technique(
    plan: PlanRecord, name: str, axis: int, by_module: dict[str, list[str]], moved: set[tuple[str, str, int]]
) -> str:
    if plan.mesh_record.sizes[axis] == 1:
        return ""
    code = parse_layout(plan.parameters[name])[axis]
    roles = roles_on(plan, by_module.get(name.rpartition(".")[0], []), axis)
    placeholder = plan.placeholders.get(name, "")
    if code == REPLICATE:
        gradient = plan.gradients.get(name, "")
        if "sequence" in roles and "batch" not in roles:
            return "sequence"
        reduced = any((gradient, kind, axis) in moved for kind in ("all_reduce", "reduce_scatter"))
        return _DATA_PARALLEL if "batch" in roles or reduced else ""
    if any((placeholder, kind, axis) in moved for kind in ("all_gather", "all_to_all")):
        return "ZeRO-2" if _is_kept_whole(plan, placeholder, axis) else "ZeRO-3"
    return next((role for role in roles if role in _OF_WEIGHTS), "sharded")


def _is_kept_whole(plan: PlanRecord, placeholder: str, axis: int) -> bool:
    """Tell whether a copy that is whole on ``axis`` is gathered once and kept from the forward for the backward."""
    return any(parse_layout(layout)[axis] == REPLICATE for layout in plan.saved.get(placeholder, ()))


def layout_text(plan: PlanRecord, layout: str, techniques: Sequence[str] = ()) -> str:
    """Return a layout in words: ``S1 over data (ZeRO-3), S0 over model (column)``.

    Axes that do the same stand together (``S0 over data, model (ZeRO-3)``), axes without news are left out.
    """
    codes = parse_layout(layout)
    axes: dict[tuple[int, str], list[str]] = defaultdict(list)
    for axis in wide_axes(plan):
        technique = techniques[axis] if techniques else ""
        if codes[axis] != REPLICATE or technique:
            axes[codes[axis], technique].append(plan.mesh_record.names[axis])
    parts = [
        f"{code_name(code)} over {', '.join(names)}" + (f" ({technique})" if technique else "")
        for (code, technique), names in axes.items()
    ]
    return ", ".join(parts) or "whole on every rank"
