"""What ``print(plan)`` shows: totals, memory, parameters by group, collectives by kind."""

from __future__ import annotations

import textwrap
from collections import defaultdict

from autopar.placement import local_shape, parse_layout
from autopar.plan_records import CollectiveRow, PlanRecord
from autopar.report.fold_names import fold_names, pattern_of
from autopar.report.pipeline_text import pipeline_lines
from autopar.report.technique import layout_text, parameter_techniques
from autopar.report.text import (
    WIDTH,
    format_bytes,
    format_count,
    format_seconds,
    format_shape,
    format_share,
    section,
    table,
)


def summarize_plan(plan: PlanRecord) -> str:
    """Return the whole plan on a page of text, at most 110 columns wide."""
    blocks = [
        totals_text(plan),
        section("Memory on the fullest rank", memory_text(plan)),
        section("Parameters and buffers", _parameters_text(plan)),
        section("Collectives in a step, on one rank", collectives_text(plan.collectives, plan)),
    ]
    return "\n".join(blocks)


def totals_text(plan: PlanRecord) -> str:
    """Return the head of a report: mesh, predicted seconds, how the plan was found, what was asked."""
    record, cost, solver = plan.mesh_record, plan.cost, plan.solver
    axes = " x ".join(f"{name}={size}" for name, size in zip(record.names, record.sizes))
    whole = sum(all(choice == "replicate" for choice in choices) for choices in plan.choices.values())
    found = f", found in {format_seconds(solver.seconds)}" if solver.seconds else ""
    pipeline, search = plan.pipeline, plan.search
    simulated = pipeline is not None and (pipeline.ranks > 1 or bool(search and search.chosen))
    if simulated:
        parts = f"fullest rank busy {format_seconds(cost.compute_seconds)}, waiting "
        parts += f"{format_seconds(cost.communication_seconds)} "
        parts += f"({format_share(cost.communication_seconds, cost.step_seconds)} of the step)"
    else:
        parts = f"compute {format_seconds(cost.compute_seconds)}, communication exposed "
        parts += f"{format_seconds(cost.exposed_seconds)} ({format_share(cost.exposed_seconds, cost.step_seconds)} of "
        parts += f"the step), hidden {format_seconds(cost.hidden_seconds)}"
    return "\n".join(
        (
            f"Plan for a mesh of {axes} ({format_count(plan.mesh.num_ranks, 'rank')}, device {record.device})",
            f"  step    {format_seconds(cost.step_seconds)} predicted: {parts}",
            f"  solver  {solver.status}: objective {format_seconds(solver.objective_s)}, "
            f"bound {format_seconds(solver.bound_s)}, gap {100 * solver.gap:.3g} %" + found,
            f"          {format_count(solver.variables, 'variable')}, {format_count(solver.constraints, 'row')}, "
            f"{format_count(solver.regions, 'repeated region')}",
            *pipeline_lines(plan),
            *_recomputed_lines(plan),
            f"  ops     {len(plan.choices):,}, of which {whole:,} run whole on every rank",
            textwrap.fill(
                ", ".join(_asked(plan)), WIDTH, initial_indent="  asked   ", subsequent_indent=" " * 10,
                break_on_hyphens=False,
            ),
        )
    )  # fmt: skip


def _recomputed_lines(plan: PlanRecord) -> list[str]:
    """Return what the backward computes again, by module, and what the next gigabyte would buy."""
    lines = []
    if plan.recomputed:
        modules = dict.fromkeys(pattern_of(plan.modules.get(name, "")) or "the root" for name in plan.recomputed)
        text = f"{format_count(len(plan.recomputed), 'op')} computed again in the backward, of {', '.join(modules)}"
        lines.append(textwrap.shorten(f"again   {text}", WIDTH - 2, placeholder=" ..."))
    if plan.solver.next_gb_s > 0:
        lines.append(f"memory  1 GB more a rank would save at most {format_seconds(plan.solver.next_gb_s)} a step")
    return [f"  {line}" for line in lines]


def _asked(plan: PlanRecord) -> list[str]:
    options = plan.options
    asked = [f"optimizer {options.optimizer}", f"inputs {options.inputs}", f"outputs {options.outputs}"]
    if options.memory is not None:
        asked.append(f"memory {format_bytes(options.memory)}")
    asked += [f"{pattern} = {technique}" for pattern, technique in sorted(options.constraints.items())]
    if options.pinned:
        asked.append(format_count(len(options.pinned), "pinned parameter"))
    return asked


def memory_text(plan: PlanRecord) -> str:
    """Return the memory table, with the budget if there is one."""
    memory = plan.memory
    parts = (
        ("parameters", memory.parameters_bytes),
        ("gradients", memory.gradients_bytes),
        (f"optimizer state ({plan.options.optimizer})", memory.optimizer_bytes),
        ("buffers", memory.buffers_bytes),
        ("saved for the backward", memory.saved_bytes),
    )
    rows = [(what, format_bytes(count), format_share(count, memory.total_bytes)) for what, count in parts]
    rows.append(("total", format_bytes(memory.total_bytes), ""))
    budget = plan.options.memory
    if budget is not None:
        rows.append(("budget", format_bytes(budget), f"{format_share(memory.total_bytes, budget)} used"))
    if memory.peak_bytes:
        over = budget is not None and memory.peak_bytes > budget
        what = f"alive at once, at most (at {memory.peak_at})"
        rows.append((what, format_bytes(memory.peak_bytes), "beyond the budget" if over else ""))
        rows.append(("  temporaries among it", format_bytes(memory.temporaries_bytes), ""))
        rows.append(("largest gather", format_bytes(memory.gather_bytes), ""))
    if memory.reserve_bytes:
        rows.append(("reserve of the budget for that", format_bytes(memory.reserve_bytes), ""))
    return table(("part", "bytes", "share"), rows, right=("bytes", "share"))


def _parameters_text(plan: PlanRecord) -> str:
    techniques = parameter_techniques(plan)
    keys = {
        name: (plan.parameter_shapes.get(name), plan.parameters[name], techniques[name]) for name in plan.parameters
    }
    rows = []
    for fold in fold_names(keys):
        shape, layout, words = fold.key
        piece = "" if shape is None else format_shape(piece_shape(plan, shape, layout))
        whole = "" if shape is None else format_shape(shape)
        rows.append((fold.label, str(len(fold.names)), whole, piece, layout_text(plan, layout, words)))
    return table(("name", "count", "shape", "on a rank", "where it rests"), rows, right=("count",)) if rows else "none"


def piece_shape(plan: PlanRecord, shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Return the shape of the largest piece of a tensor, the first rank's."""
    sizes = plan.mesh_record.sizes
    return local_shape(shape, parse_layout(layout), sizes, (0,) * len(sizes))


def collectives_text(rows: tuple[CollectiveRow, ...], plan: PlanRecord) -> str:
    """Return a table of collectives, one row for each phase, kind and axis, the dearest first."""
    groups: dict[tuple[str, str, int], list[CollectiveRow]] = defaultdict(list)
    for row in rows:
        groups[row.phase, row.kind, row.axis].append(row)
    lines = []
    for (phase, kind, axis), members in sorted(groups.items(), key=lambda item: (-_seconds(item[1]), item[0])):
        lines.append(
            (
                phase,
                kind,
                plan.mesh_record.names[axis],
                f"{len(members):,}",
                format_bytes(sum(row.bytes for row in members)),
                format_seconds(_seconds(members)),
                main_reason(members),
            )
        )
    headers = ("phase", "kind", "axis", "count", "bytes in", "time", "main reason")
    return table(headers, lines, right=("count", "bytes in", "time")) if lines else "none"


def _seconds(rows: list[CollectiveRow]) -> float:
    return sum(row.seconds for row in rows)


def main_reason(rows: list[CollectiveRow]) -> str:
    """Return the reason that costs most among ``rows``, indices folded, and how many others there are."""
    shares: dict[str, float] = defaultdict(float)
    for row in rows:
        shares[pattern_of(row.reason)] += row.seconds
    first = max(sorted(shares), key=lambda reason: shares[reason])
    more = f" (+ {len(shares) - 1} more)" if len(shares) > 1 else ""
    return (first or "not said") + more
