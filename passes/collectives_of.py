"""Read a lowered program: which collectives it runs, and why."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from autopar.passes.collective_calls import collective_calls
from autopar.passes.local_program import LocalProgram
from autopar.placement import layout_name
from autopar.plans import CollectiveRow


def collectives_of(program: LocalProgram) -> tuple[CollectiveRow, ...]:
    """Return every collective of a lowered program in order, with the bytes that this rank hands in, padding too.

    Collectives that run as one are listed one by one, as a plan lists them, those on several axes one an axis.
    """
    rows = []
    for node in program.joint.graph.nodes:
        for call in collective_calls(node):
            for axis, reason in call.steps:
                rows.append(
                    CollectiveRow(
                        kind=call.kind,
                        axis=axis,
                        tensor=call.origin,
                        phase=node.meta["phase"],
                        bytes=call.bytes_in,
                        seconds=0.0,
                        reason=reason,
                    )
                )
    return tuple(rows)


def format_local(program: LocalProgram) -> str:
    """Return a lowered program as text: one line a node with its local shape, and a line of reason above every arc."""
    where = ", ".join(f"{name} {index}" for name, index in zip(program.mesh.names, program.coordinate))
    lines = [f"rank {program.mesh.rank(program.coordinate)} ({where})"]
    phase = ""
    for node in program.joint.graph.nodes:
        if node.op == "placeholder":
            lines.append(f"{node.name}: {_shape(node)} in {layout_name(program.input_layouts[node.name])}")
            continue
        if node.op != "output" and node.meta["phase"] != phase:
            phase = node.meta["phase"]
            lines.append(f"--- {phase}")
        lines.extend(_node_lines(node))
    return "\n".join(lines)


def _node_lines(node: fx.Node) -> Iterator[str]:
    if node.op == "output":
        yield f"return {node.args[0]}"
        return
    for call in collective_calls(node):
        yield f"# {call.origin} {call.reason}"
    arguments = ", ".join([*map(str, node.args), *(f"{key}={value}" for key, value in node.kwargs.items())])
    layout = f" in {layout_name(node.meta['layout'])}" if "layout" in node.meta else ""
    yield f"{node.name}: {_shape(node)}{layout} = {node.target}({arguments})"


def _shape(node: fx.Node) -> str:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return " ".join(str(list(v.shape)) if isinstance(v, torch.Tensor) else str(v) for v in values)
