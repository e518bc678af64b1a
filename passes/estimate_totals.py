"""Let modules take the statistics of a micro-batch for those of the batch: what a user asks for of batch norms."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from .rules.micro_batches import OVER

_MUL: Any = torch.ops.aten.mul.Tensor


def estimate_totals(
    graph: fx.Graph, modules: Collection[str], moves: Mapping[fx.Node, bool], count: int, gradients: Collection[fx.Node]
) -> None:
    """Replace sums over the batch, where the micro-batches of ``modules`` need them, by ``count`` times their part.

    A mean over the batch is then that of the micro-batch, in the forward and in the backward alike, and a gradient the
    sum of the micro-batches' gradients. What does not run for each micro-batch, new running statistics among it, still
    reads the true totals: running statistics move once a step, towards those of the batch.

    Args:
        graph: of a micro-batch; changed in place.
        modules: full names.
        moves: the nodes that are another in every micro-batch.
        count: of the micro-batches.
        gradients: nodes among the outputs that are gradients.
    """
    made: dict[fx.Node, fx.Node] = {}

    def estimated(node: fx.Node) -> fx.Node:
        if node in made:
            return made[node]
        found = node
        if node.target is OVER and node.args[1] == "sum" and node.meta["module"] in modules:
            with graph.inserting_after(node):
                found = graph.create_node(
                    "call_function", _MUL, (node.args[0], float(count)), name=f"{node.name}_guess"
                )
        elif node.op == "call_function" and node.target is not OVER and not moves[node]:
            sources = {source: estimated(source) for source in node.all_input_nodes}
            if any(guess is not source for source, guess in sources.items()):
                with graph.inserting_after(node):
                    found = graph.node_copy(node, sources.__getitem__)
        if found is not node:
            found.meta = dict(node.meta)
        made[node] = found
        return found

    for node in list(graph.nodes):
        if moves.get(node) and node.op == "call_function":
            node.args = fx.node.map_arg(node.args, estimated)
            node.kwargs = fx.node.map_arg(node.kwargs, estimated)
    for end in gradients:
        guess = estimated(end)
        if guess is not end:
            with graph.inserting_after(guess):
                share = graph.create_node("call_function", _MUL, (guess, 1.0 / count), name=f"{end.name}_share")
            with graph.inserting_after(share):
                total = graph.create_node("call_function", OVER, (share, "sum"), name=f"{end.name}_shares")
            for made_node in (share, total):
                made_node.meta = dict(end.meta)
            graph.output_node().replace_input_with(end, total)
