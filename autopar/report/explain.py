"""Explain one name of a plan: a module, a parameter, an input, an output or an op node."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from textwrap import fill

from autopar.errors import PlanError
from autopar.plan_records import CollectiveRow, PlanRecord
from autopar.report.fold_names import natural_key
from autopar.report.summary import piece_shape
from autopar.report.technique import (
    layout_text,
    node_role,
    order_nodes,
    parameter_techniques,
    strategy_text,
    wide_axes,
)
from autopar.report.text import format_bytes, format_count, format_seconds, format_shape, section, table

MAX_ROWS = 60


def explain_name(plan: PlanRecord, name: str) -> str:
    """Return all that ``plan`` says about ``name``: choices in words, where tensors rest, what moves, why and its cost.

    A ``*`` in the name stands for anything, as in the pages of a plan: the first name that fits is told, and all named.

    Raises:
        PlanError: the plan knows nothing by this name; the message has the nearest names.
    """
    name = name.strip()
    for known, describe in _KINDS:
        if name in known(plan):
            return describe(plan, name)
    for known, describe in _KINDS if "*" in name else ():
        fitting = sorted((each for each in known(plan) if fnmatchcase(each, name)), key=natural_key)
        if fitting:
            shown = ", ".join(fitting[:MAX_ROWS]) + (", ..." if len(fitting) > MAX_ROWS else "")
            head = fill(f"{name} fits {len(fitting):,}: {shown}", 110, break_long_words=False, break_on_hyphens=False)
            return f"{head}\n\n{describe(plan, fitting[0])}"
    raise PlanError(_unknown(plan, name))


def _unknown(plan: PlanRecord, name: str) -> str:
    names = sorted({known for kind, _ in _KINDS for known in kind(plan) if known}, key=natural_key)
    close = difflib.get_close_matches(name, names, n=5, cutoff=0.5)
    close += [known for known in names if name and name in known and known not in close][: 5 - len(close)]
    advice = f"nearest: {', '.join(close)}" if close else "print the plan to see the names of its parameters"
    return f"the plan knows no module, parameter, input, output or op called {name!r}; {advice}"


def _module_names(plan: PlanRecord) -> set[str]:
    """Return every module path, those of modules that only hold others included."""
    names: set[str] = set()
    for path in {*plan.modules.values(), *(name.rpartition(".")[0] for name in plan.parameters)}:
        while path:
            names.add(path)
            path = path.rpartition(".")[0]
    return names


def _inside(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")


def _explain_module(plan: PlanRecord, name: str) -> str:
    nodes = order_nodes(plan, (n for n, path in plan.modules.items() if _inside(path, name) and n in plan.choices))
    parameters = [parameter for parameter in sorted(plan.parameters, key=natural_key) if _inside(parameter, name)]
    tensors_text = "parameter or buffer" if len(parameters) == 1 else "parameters and buffers"
    head = f"{name}: a module of {format_count(len(nodes), 'op')} and {len(parameters):,} {tensors_text}"
    blocks = [head]
    own = [node for node in nodes if plan.modules[node] == name]
    if own:
        blocks.append(f"  split   {strategy_text(plan, own)}")
    children = sorted({plan.modules[node] for node in nodes} - {name}, key=natural_key)
    if children:
        rows = [(path, strategy_text(plan, [n for n in nodes if plan.modules[n] == path])) for path in children]
        blocks.append(section("Modules inside", _limited(("module", "split"), rows)))
    if parameters:
        blocks.append(section("Parameters and buffers", _resting(plan, parameters)))
    if own:
        blocks.append(section("Ops of its own", _ops(plan, own)))
    tensors = {*nodes, *(t for p in parameters for t in _tensors_of(plan, p))}
    blocks.append(section("What moves for it, on one rank in a step", _moves(plan, tensors, name)))
    return "\n".join(blocks)


def _explain_parameter(plan: PlanRecord, name: str) -> str:
    words = parameter_techniques(plan)[name]
    lines = [f"{name}: a parameter or buffer", f"  rests   {layout_text(plan, plan.parameters[name], words)}"]
    shape = plan.parameter_shapes.get(name)
    if shape is not None:
        piece = piece_shape(plan, shape, plan.parameters[name])
        lines.append(f"  shape   {format_shape(shape)}, of which a rank holds {format_shape(piece)}")
    if name in plan.options.pinned:
        lines.append("  pinned  it lay there already when the plan was made")
    module = name.rpartition(".")[0]
    nodes = order_nodes(plan, (n for n, path in plan.modules.items() if path == module and n in plan.choices))
    if nodes:
        lines.append(f"  module  {module}: {strategy_text(plan, nodes)}")
    lines.append(section("What moves for it, on one rank in a step", _moves(plan, set(_tensors_of(plan, name)), name)))
    return "\n".join(lines)


def _explain_node(plan: PlanRecord, name: str) -> str:
    where = plan.modules.get(name, "")
    head = f"{name}: an op of the {plan.phases.get(name, 'program')}" + (f", in {where}" if where else "")
    lines = [head, section("Its split", _ops(plan, [name]))]
    if name in plan.saved:
        kept = "; ".join(layout_text(plan, layout) for layout in plan.saved[name])
        lines.append(f"\nKept for the backward: {kept}")
    lines.append(section("What moves for it, on one rank in a step", _moves(plan, {name}, name)))
    return "\n".join(lines)


def _explain_input(plan: PlanRecord, name: str) -> str:
    moves = _moves(plan, {plan.placeholders.get(name, "")}, name)
    return "\n".join(
        (
            f"{name}: an input",
            f"  passed  {layout_text(plan, plan.inputs[name])}",
            section("What moves for it, on one rank in a step", moves),
        )
    )


def _explain_output(plan: PlanRecord, name: str) -> str:
    return f"{name or 'the output'}: an output\n  returned  {layout_text(plan, plan.outputs[name])}"


def _tensors_of(plan: PlanRecord, parameter: str) -> list[str]:
    """Return the nodes that carry a parameter and its gradient."""
    nodes = (plan.placeholders.get(parameter), plan.gradients.get(parameter))
    return [node for node in nodes if node is not None]


def _resting(plan: PlanRecord, parameters: Iterable[str]) -> str:
    words = parameter_techniques(plan)
    rows = []
    for name in parameters:
        shape = plan.parameter_shapes.get(name)
        piece = "" if shape is None else format_shape(piece_shape(plan, shape, plan.parameters[name]))
        whole = "" if shape is None else format_shape(shape)
        rows.append((name, whole, piece, layout_text(plan, plan.parameters[name], words[name])))
    return _limited(("name", "shape", "on a rank", "where it rests"), rows)


def _ops(plan: PlanRecord, nodes: Sequence[str]) -> str:
    axes = wide_axes(plan) or list(range(len(plan.mesh_record.sizes)))
    headers = ("op", "phase", *(f"over {plan.mesh_record.names[axis]}" for axis in axes))
    rows = []
    for node in nodes:
        cells = [_choice_text(plan, node, axis) for axis in axes]
        rows.append((node, plan.phases.get(node, ""), *cells))
    return _limited(headers, rows)


def _choice_text(plan: PlanRecord, node: str, axis: int) -> str:
    choice, role = plan.choices[node][axis], node_role(plan, node, axis)
    return f"{role} ({choice})" if role and choice not in role else role or choice


def _moves(plan: PlanRecord, tensors: set[str], name: str) -> str:
    """Return the collectives of some tensors, and those whose reason speaks of ``name``."""
    spoken = re.compile(rf"(?<![\w.]){re.escape(name)}(?!\w)")
    rows = [row for row in plan.collectives if row.tensor in tensors or spoken.search(row.reason)]
    if not rows:
        return "nothing"
    cells = [_move(plan, row) for row in sorted(rows, key=lambda row: (row.phase != "forward", -row.seconds))]
    text = _limited(
        ("phase", "kind", "axis", "tensor", "bytes in", "time", "reason"), cells, right=("bytes in", "time")
    )
    total = sum(row.seconds for row in rows)
    return f"{text}\nin all {format_seconds(total)}, {format_bytes(sum(row.bytes for row in rows))} in"


def _move(plan: PlanRecord, row: CollectiveRow) -> tuple[str, ...]:
    axis = plan.mesh_record.names[row.axis]
    return (
        row.phase,
        row.kind,
        axis,
        row.tensor,
        format_bytes(row.bytes),
        format_seconds(row.seconds),
        row.reason or "not said",
    )


def _limited(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> str:
    """Return a table of the first rows, and say how many are left out."""
    text = table(headers, rows[:MAX_ROWS], right)
    left = len(rows) - MAX_ROWS
    return f"{text}\n... and {left:,} more: ask for a name further inside" if left > 0 else text


_Known = Callable[[PlanRecord], Iterable[str]]
_Describe = Callable[[PlanRecord, str], str]
_KINDS: tuple[tuple[_Known, _Describe], ...] = (
    (lambda plan: plan.parameters, _explain_parameter),
    (_module_names, _explain_module),
    (lambda plan: plan.choices, _explain_node),
    (lambda plan: plan.inputs, _explain_input),
    (lambda plan: plan.outputs, _explain_output),
)
