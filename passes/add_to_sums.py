"""Let the backward of a micro-batch add its gradients to the sums of those before it, each where it is made.

Added up when the backward is done, all gradients of a micro-batch would lie beside the sums: twice the gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from .stage_pieces import Segment, Total

_ADD: Any = torch.ops.aten.add.Tensor


def add_to_sums(
    segment: Segment, totals: Sequence[Total], needed: Collection[str], make: type[fx.GraphModule] = fx.GraphModule
) -> Segment | None:
    """Return a segment as it runs from its second micro-batch on, None where it gives nothing to a sum.

    Behind what the segment takes it takes the sums so far, by the names of the totals, and it gives the new ones under
    these names. The sums so far are only read, for they may lie in any memory: a first micro-batch gives its gradients
    as they are. A gradient that was reduced in the loop is added at the end, so that its collective may take that long.

    Args:
        segment: as it runs for the first micro-batch.
        totals: of its stage.
        needed: parts that somebody else reads, too, and that are given beside the sums.
        make: the kind of module to make.
    """
    module = segment.graph_module
    made = dict(zip(segment.gives, module.graph.output_node().args[0]))  # type: ignore[arg-type]
    sums = [total for total in totals if total.op == "sum" and total.part in made]
    if not sums:
        return None
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(module.graph, copies)
    gives = {name: copies[node] for name, node in made.items()}
    given_up = {total.part for total in sums} - set(needed)
    places = [copies[node] for node in module.graph.nodes if node.op == "placeholder"]
    for total in sums:
        gives[total.name] = _add(graph, total.name, gives[total.part], places)
    gives = {name: node for name, node in gives.items() if name not in given_up}
    graph.output(tuple(gives.values()))
    takes = (*segment.takes, *(total.name for total in sums))
    return Segment(make(module, graph), takes, tuple(gives))


def _add(graph: fx.Graph, name: str, part: fx.Node, places: list[fx.Node]) -> fx.Node:
    """Add a part to the sum so far, which the graph takes behind ``places``; return the new sum."""
    first = next(iter(graph.nodes))
    with graph.inserting_after(places[-1]) if places else graph.inserting_before(first):
        earlier = graph.placeholder(name)
    places.append(earlier)
    if "arc" in part.meta:
        total = graph.call_function(_ADD, (earlier, part))
    else:
        with graph.inserting_after(part):
            total = graph.call_function(_ADD, (earlier, part))
    for node in (earlier, total):
        node.meta = {key: value for key, value in part.meta.items() if key != "arc"}
    return total
