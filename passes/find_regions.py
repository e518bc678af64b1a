"""Find the regions of a program: consecutive parts of the forward between which stages may be cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from .program import Program, is_getitem


@dataclass(frozen=True)
class Span:
    """One region: its name and its forward ops in graph order."""

    name: str
    ops: tuple[str, ...]


def region_key(path: str) -> str:
    """Return the part of a module path that names its region: up to the first number, or else two names.

    >>> region_key("model.layers.3.mlp.up_proj"), region_key("bert.embeddings.word"), region_key("head")
    ('model.layers.3', 'bert.embeddings', 'head')
    """
    parts = path.split(".") if path else []
    for at, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: at + 1])
    return ".".join(parts[:2])


def find_regions(program: Program) -> tuple[Span, ...]:
    """Return the regions in graph order; together they hold every forward op once.

    A region is a stretch of the graph that one numbered module (a layer), or one module beside them (an embedding, a
    head), makes. Ops of no module, or of one that holds the current region, belong to the region they stand in.
    A stretch without parameters joins the one before it, the first one that after it.
    """
    stretches: list[tuple[str, list[str]]] = []
    for node in _forward_ops(program):
        key = region_key(str(node.meta.get("module", "")))
        current = stretches[-1][0] if stretches else ""
        if not stretches or (key and not _holds(key, current)):
            if stretches and key == current:
                stretches[-1][1].append(node.name)
            else:
                stretches.append((key, [node.name]))
        else:
            stretches[-1][1].append(node.name)
    return _numbered(_joined(program, stretches))


def _forward_ops(program: Program) -> list[fx.Node]:
    return [node for node in program.ops() if node.meta.get("phase") == "forward"]


def _holds(key: str, current: str) -> bool:
    """Tell whether the module ``key`` contains the region ``current``."""
    return current.startswith(key + ".")


def _joined(program: Program, stretches: Sequence[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    nodes = program.nodes()
    parameters = {role.node for role in program.inputs if role.kind == "parameter"}
    out: list[tuple[str, list[str]]] = []
    waiting: list[str] = []
    for key, ops in stretches:
        owns = any(operand.name in parameters for name in ops for operand in nodes[name].all_input_nodes)
        if owns:
            out.append((key, waiting + ops))
            waiting = []
        elif out:
            out[-1][1].extend(ops)
        else:
            waiting += ops
    if waiting:
        out.append((stretches[0][0], waiting))
    return out


def _numbered(stretches: Sequence[tuple[str, list[str]]]) -> tuple[Span, ...]:
    """Name stretches of one module apart: the second is called ``name#2``."""
    seen: dict[str, int] = {}
    out = []
    for key, ops in stretches:
        key = key or "model"
        seen[key] = seen.get(key, 0) + 1
        out.append(Span(key if seen[key] == 1 else f"{key}#{seen[key]}", tuple(ops)))
    return tuple(out)


def region_of(program: Program, spans: Sequence[Span]) -> dict[str, int]:
    """Return the region of every node: of a backward op that of its forward op, of a placeholder that of a reader."""
    at = {name: index for index, span in enumerate(spans) for name in span.ops}
    for node in program.graph.nodes:
        if node.name in at or node.op in ("placeholder", "output"):
            continue
        forward = node.meta.get("forward_node")
        before = [at[operand.name] for operand in node.all_input_nodes if operand.name in at]
        if is_getitem(node):
            at[node.name] = at[node.all_input_nodes[0].name]
        elif forward in at:
            at[node.name] = at[forward]
        elif node.meta.get("phase") == "backward":
            at[node.name] = min(before, default=len(spans) - 1)
        else:
            at[node.name] = max(before, default=0)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            readers = [at[user.name] for user in node.users if user.name in at]
            at[node.name] = min(readers, default=0)
    return at


def late_nodes(program: Program, at: Mapping[str, int]) -> set[str]:
    """Return the backward nodes that no other region waits for: the backward for weights.

    Args:
        at: the region of every node.
    """
    late: set[str] = set()
    for node in reversed(list(program.graph.nodes)):
        if node.meta.get("phase") != "backward" or node.op != "call_function":
            continue
        users = [user for user in node.users if user.op == "call_function"]
        if all(user.name in late and at[user.name] == at[node.name] for user in users):
            late.add(node.name)
    return late
