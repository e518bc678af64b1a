"""Cut a lowered joint graph into its forward and its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch.fx.graph import PythonCode

from autopar.errors import LoweringError
from autopar.passes.program import Input, Output, has_many_results


class GraphOnly(fx.GraphModule):
    """A graph module without generated code: to read, to print, to interpret, but not to call."""

    def recompile(self) -> Any:
        return PythonCode("", {}, {}, 0)


def split_phases(
    joint: fx.GraphModule, inputs: Sequence[Input], outputs: Sequence[Output], *, callable_halves: bool = True
) -> tuple[fx.GraphModule, fx.GraphModule | None, int]:
    """Return the forward graph, the backward graph (None without gradients) and the number of saved tensors.

    The forward takes all placeholders but the tangents, and returns what is no gradient (where a node computes it),
    then the saved tensors: every forward tensor that the backward reads. The backward takes those and the tangents,
    and returns the gradients.

    Args:
        callable_halves: generate code, so that the halves can be called; otherwise they are ``GraphOnly``.

    Raises:
        LoweringError: a forward node reads a tangent or a backward node.
    """
    nodes = list(joint.graph.nodes)
    tangents = {role.node for role in inputs if role.kind == "tangent"}
    late = {node for node in nodes if node.name in tangents or node.meta.get("phase") == "backward"}
    ends = list(zip(outputs, nodes[-1].args[0]))
    make = fx.GraphModule if callable_halves else GraphOnly
    first = [end for role, end in ends if role.kind != "gradient" and isinstance(end, fx.Node)]
    last = [end for role, end in ends if role.kind == "gradient" and isinstance(end, fx.Node)]
    body = nodes[:-1]
    for node in body:
        if node not in late and any(source in late for source in node.all_input_nodes):
            raise LoweringError(f"the forward node {node.name} reads the backward: {node.format_node()}")
    if any(end in late for end in first):
        raise LoweringError("an output of the forward is computed in the backward; capture should have set its phase")
    if not any(role.kind == "gradient" for role in outputs):
        return _extract(joint, [n for n in body if n not in late], [], first, make), None, 0
    wanted = {source for node in body if node in late for source in node.all_input_nodes} | set(last)
    saved = [node for node in body if node in wanted and node not in late and node.op != "get_attr"]
    for node in saved:
        if has_many_results(node):
            raise LoweringError(f"the backward reads the tuple of {node.name}; its getitem must be of the forward")
    forward = _extract(joint, [n for n in body if n not in late], [], first + saved, make)
    constants = [node for node in body if node in wanted and node.op == "get_attr"]
    backward = _extract(joint, constants + [n for n in body if n in late], saved, last, make)
    return forward, backward, len(saved)


def _extract(
    joint: fx.GraphModule,
    body: Sequence[fx.Node],
    entries: Sequence[fx.Node],
    results: Sequence[fx.Node],
    make: type[fx.GraphModule],
) -> fx.GraphModule:
    """Return a graph of ``body`` that takes ``entries``, then the placeholders of ``body``, and returns ``results``."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in entries:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    ordered = [n for n in body if n.op == "placeholder"] + [n for n in body if n.op != "placeholder"]
    for node in ordered:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in results))
    return make(joint, graph)
