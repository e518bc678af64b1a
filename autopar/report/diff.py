"""Show what two plans do differently, and what that costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from autopar.plan_records import PlanRecord
from autopar.report.fold_names import fold_names
from autopar.report.technique import layout_text, module_strategies, parameter_techniques
from autopar.report.text import format_bytes, format_count, format_seconds, section, table

_NONE = "-"


def diff_plans(before: PlanRecord, after: PlanRecord) -> str:
    """Return the differences between two plans as text: totals, memory, parameters, modules, collectives."""
    if before == after:
        return "the plans are equal"
    blocks = [_origin_text(before, after)]
    tables = (
        ("Totals", _totals(before, after)),
        ("Options", _changes(_options(before), _options(after))),
        ("Parameters and buffers", _changes(_resting(before), _resting(after))),
        ("Inputs and outputs", _changes(_ends(before), _ends(after))),
        ("Modules", _changes(module_strategies(before), module_strategies(after))),
        ("Collectives in a step, on one rank", _changes(_collectives(before), _collectives(after))),
    )
    blocks += [section(title, body) for title, body in tables if body]
    return "\n".join(block for block in blocks if block)


def _origin_text(before: PlanRecord, after: PlanRecord) -> str:
    lines = []
    if before.fingerprint != after.fingerprint:
        lines.append("The plans are for different programs: another model, other input shapes or another version.")
    if before.mesh_record != after.mesh_record:
        lines.append(f"The plans are for different meshes: {before.mesh} and {after.mesh}.")
    ops = sum(before.choices.get(node) != after.choices.get(node) for node in {*before.choices, *after.choices})
    lines.append(f"{format_count(ops, 'op')} of {len(after.choices):,} split otherwise.")
    return "\n".join(lines)


def _totals(before: PlanRecord, after: PlanRecord) -> str:
    rows = []
    amounts: tuple[tuple[str, Callable[[PlanRecord], float], Callable[[float], str]], ...] = (
        ("step", lambda plan: plan.cost.step_seconds, format_seconds),
        ("compute", lambda plan: plan.cost.compute_seconds, format_seconds),
        ("communication", lambda plan: plan.cost.communication_seconds, format_seconds),
        ("of it hidden", lambda plan: plan.cost.hidden_seconds, format_seconds),
        ("memory: parameters", lambda plan: plan.memory.parameters_bytes, _bytes),
        ("memory: gradients", lambda plan: plan.memory.gradients_bytes, _bytes),
        ("memory: optimizer state", lambda plan: plan.memory.optimizer_bytes, _bytes),
        ("memory: buffers", lambda plan: plan.memory.buffers_bytes, _bytes),
        ("memory: saved", lambda plan: plan.memory.saved_bytes, _bytes),
        ("memory: total", lambda plan: plan.memory.total_bytes, _bytes),
        ("memory: alive at once", lambda plan: plan.memory.peak_bytes, _bytes),
    )
    for what, amount, show in amounts:
        first, second = amount(before), amount(after)
        if first != second:
            ratio = f"{second / first:.3g} x" if first else _NONE
            rows.append((what, show(first), show(second), ratio))
    first_status, second_status = _status(before), _status(after)
    if first_status != second_status:
        rows.append(("solver", first_status, second_status, ""))
    return table(("what", "before", "after", "ratio"), rows, right=("ratio",)) if rows else ""


def _status(plan: PlanRecord) -> str:
    return f"{plan.solver.status}, gap {100 * plan.solver.gap:.3g} %"


def _bytes(amount: float) -> str:
    return format_bytes(int(amount))


def _options(plan: PlanRecord) -> dict[str, str]:
    options = plan.options
    memory = "no budget" if options.memory is None else format_bytes(options.memory)
    out = {"optimizer": options.optimizer, "memory": memory, "inputs": options.inputs, "outputs": options.outputs}
    out |= {f"constraint {pattern}": technique for pattern, technique in options.constraints.items()}
    return out | {f"pinned {name}": layout for name, layout in options.pinned.items()}


def _resting(plan: PlanRecord) -> dict[str, str]:
    techniques = parameter_techniques(plan)
    return {name: layout_text(plan, layout, techniques[name]) for name, layout in plan.parameters.items()}


def _ends(plan: PlanRecord) -> dict[str, str]:
    ends = {f"input {name}": layout_text(plan, layout) for name, layout in plan.inputs.items()}
    return ends | {f"output {name}": layout_text(plan, layout) for name, layout in plan.outputs.items()}


def _collectives(plan: PlanRecord) -> dict[str, str]:
    groups: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in plan.collectives:
        key = f"{row.phase} {row.kind} over {plan.mesh_record.names[row.axis]}"
        groups[key].append((row.bytes, row.seconds))
    return {
        key: f"{len(rows):,}: {format_bytes(sum(b for b, _ in rows))}, {format_seconds(sum(s for _, s in rows))}"
        for key, rows in groups.items()
    }


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return a table of the names whose text differs, folded by name; empty if none does."""
    names = sorted({*before, *after})
    changed = {name: (before.get(name, _NONE), after.get(name, _NONE)) for name in names}
    changed = {name: pair for name, pair in changed.items() if pair[0] != pair[1]}
    rows = [(fold.label, str(len(fold.names)), *fold.key) for fold in fold_names(changed, within=names)]
    return table(("name", "count", "before", "after"), rows, right=("count",)) if rows else ""
