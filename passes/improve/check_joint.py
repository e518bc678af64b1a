"""Check that a lowered joint graph is sound: run between passes in tests."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autopar.errors import LoweringError

from ..collective_calls import WAIT, collective_calls, is_collective
from ..local_program import group_word
from ..program import has_many_results, is_getitem


def check_joint(joint: fx.GraphModule) -> None:
    """Check that every value is there before it is read, phases stay apart, each collective is waited for once.

    Its group is that of the axes whose arcs it carries out.

    Raises:
        LoweringError: it names the first node that breaks a rule.
    """
    joint.graph.lint()
    fault = next(_faults(joint.graph), None)
    if fault is not None:
        raise LoweringError(fault)


def _faults(graph: fx.Graph) -> Iterator[str]:
    seen: set[fx.Node] = set()
    in_backward = False
    for node in graph.nodes:
        for source in node.all_input_nodes:
            if source not in seen:
                yield f"{node.name} reads {source.name}, which is computed behind it"
        seen.add(node)
        if node.op in ("placeholder", "output"):
            continue
        if "val" not in node.meta:
            yield f"{node.name} has no val"
        if in_backward and node.meta["phase"] == "forward":
            yield f"{node.name} is of the forward and stands in the backward"
        in_backward |= node.meta["phase"] == "backward"
        if is_collective(node):
            yield from _unwaited(node)
            for call in collective_calls(node):
                if call.arguments[-1] != group_word(call.axes):
                    yield f"{node.name} carries out arcs on the axes {call.axes}, but its group is {call.arguments[-1]}"


def _unwaited(node: fx.Node) -> Iterator[str]:
    results = list(node.users) if has_many_results(node) else [node]
    if has_many_results(node) and not (all(map(is_getitem, results)) and len(results) == len(node.meta["val"])):
        yield f"{node.name} has {len(node.meta['val'])} results, of which {len(results)} are taken out"
    for result in results:
        if [user.target for user in result.users] != [WAIT]:
            yield f"{result.name} must be read by one wait, not by {[user.name for user in result.users]}"
