"""Copies of parameters that are gathered once a step and kept (ZeRO-2): gathered anew only when a parameter changed.

So several forwards and backwards between two steps of the optimizer share one gather. A change is seen by the version
counters of the parameter and of its local piece, by a piece that is another tensor or lies elsewhere, and by any step
of any torch optimizer, which may write past the counters. All of these happen alike on every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from autopar.passes.program import ancestors
from autopar.passes.split_phases import GraphOnly
from autopar.placement import parse_layout
from autopar.runtime.optimizer_steps import steps_taken
from autopar.runtime.state import local_of


def take_out_gathers(
    forward: fx.GraphModule, saved: Mapping[str, Sequence[str]]
) -> tuple[fx.GraphModule | None, fx.GraphModule, tuple[str, ...]]:
    """Cut the gathers of kept copies out of a lowered forward.

    Args:
        forward: the lowered half; its placeholders are named as those of the program.
        saved: tensor -> layouts in which it is kept for the backward, as in a plan.

    Returns:
        The graph that takes the parameters and returns the copies (None if there are none), the forward that takes the
        copies after its other arguments, and the placeholders of the parameters.
    """
    names = [node.name for node in forward.graph.nodes if node.op == "placeholder"]
    layouts = {name: set(map(parse_layout, saved[name])) for name in names if name in saved}
    kept = [
        node
        for node in forward.graph.nodes
        if node.op == "call_function" and node.meta.get("layout") in layouts.get(str(node.meta.get("tensor")), ())
    ]
    if not kept:
        return None, forward, ()
    parameters = tuple(dict.fromkeys(str(node.meta["tensor"]) for node in kept))
    needed = ancestors(kept)
    gather = _copy(forward, [n for n in forward.graph.nodes if n in needed], [], kept)
    body = [n for n in forward.graph.nodes if n.op != "output" and n not in kept]
    (results,) = next(node for node in forward.graph.nodes if node.op == "output").args
    rest = _copy(forward, body, kept, list(results))  # type: ignore[arg-type]
    for node in reversed(rest.graph.nodes):
        if "arc" in node.meta and not node.users:
            rest.graph.erase_node(node)
    return gather, rest, parameters


def _copy(
    owner: fx.GraphModule, body: Sequence[fx.Node], extra: Sequence[fx.Node], results: Sequence[fx.Node]
) -> fx.GraphModule:
    """Return a graph of ``body`` whose placeholders are its own and then one for each node of ``extra``."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in [n for n in body if n.op == "placeholder"]:
        env[node] = graph.node_copy(node)
    for node in extra:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in body:
        if node.op != "placeholder":
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in results))
    return GraphOnly(owner, graph)


class KeptCopies:
    """The copies of one program's parameters, and of which values they are."""

    def __init__(self) -> None:
        self._copies: list[Tensor] = []
        self._state: list[tuple[weakref.ref[Tensor], int, int, int]] = []
        self._step = -1

    @property
    def held(self) -> list[Tensor]:
        """The copies as they are, perhaps of old values."""
        return list(self._copies)

    def of(self, parameters: Sequence[Tensor], gather: fx.GraphModule) -> list[Tensor]:
        """Return the copies for the parameters as they are, gathered now if any changed. Collective then."""
        if self._step != steps_taken() or not self._are_same(parameters):
            self._copies = []
            with torch.no_grad():
                self._copies = list(gather([local_of(parameter) for parameter in parameters]))
            self._state = [(weakref.ref(local_of(p)), *_marks(p)) for p in parameters]
            self._step = steps_taken()
        return list(self._copies)

    def _are_same(self, parameters: Sequence[Tensor]) -> bool:
        return len(self._state) == len(parameters) and all(
            held() is local_of(parameter) and tuple(marks) == _marks(parameter)
            for (held, *marks), parameter in zip(self._state, parameters)
        )


def _marks(parameter: Tensor) -> tuple[int, int, int]:
    local = local_of(parameter)
    return parameter._version, local._version, local.untyped_storage().data_ptr()
