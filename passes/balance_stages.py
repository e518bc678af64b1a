"""Cut a program into stages of about equal work where little crosses: what is done when nobody says where to cut."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from autopar.errors import OptionError

from .program import Program, is_random, tensors_of

_SLACK = 2.0
"""A cut may carry this many times the bytes of the cheapest cut."""


def balance_stages(program: Program, num_stages: int) -> tuple[str, ...]:
    """Return the cuts of ``num_stages`` contiguous stages (``assign_stages``) whose fullest has the least work.

    Work is the flops of the forward, its bytes where an op has none. Cuts stand only where few bytes cross.

    Raises:
        OptionError: the program has too few places to cut.
    """
    if num_stages == 1:
        return ()
    ops = [node for node in program.ops() if node.meta["phase"] == "forward"]
    work = [_work(node) for node in ops]
    places = _places(program, ops)
    if len(places) < num_stages - 1:
        raise OptionError(
            f"{num_stages} stages are asked for, but the model can be cut in {len(places)} places at most; use fewer "
            "stages"
        )
    sums = [0.0]
    for each in work:
        sums.append(sums[-1] + each)
    return tuple(name_cut(ops, place) for place in _best(sums, places, num_stages))


def name_cut(ops: Sequence[fx.Node], place: int) -> str:
    """Return the name of a cut before ``ops[place]``: the path of the module that starts there, or the op's own."""
    before = {str(node.meta.get("module", "")) for node in ops[:place]}
    parts = str(ops[place].meta.get("module", "")).split(".")
    for count in range(1, len(parts) + 1):
        path = ".".join(parts[:count])
        if path and not any(other == path or other.startswith(f"{path}.") for other in before):
            return path
    return ops[place].name


def _work(node: fx.Node) -> float:
    flops = float(getattr(node.meta.get("rule"), "flops", 0.0))
    if flops:
        return flops
    return float(sum(value.numel() for value in tensors_of(node)))


def _places(program: Program, ops: Sequence[fx.Node]) -> list[int]:
    """Return the positions before which the model may be cut, those where few bytes cross."""
    position = {node: i for i, node in enumerate(ops)}
    kinds = {role.node: role.kind for role in program.inputs}
    own: set[fx.Node] = set()
    crossing = [0] * (len(ops) + 1)
    first = {}
    for node in program.graph.nodes:
        if node.op == "output" or node.meta.get("phase") == "backward":
            continue
        if node.op == "placeholder":
            reads_model = kinds[node.name] == "parameter"
        else:
            reads_model = is_random(node) or any(source in own for source in node.all_input_nodes)
        if not reads_model:
            continue
        own.add(node)
        start = position.get(node, max((first.get(s, 0) for s in node.all_input_nodes), default=0))
        first[node] = start
        if kinds.get(node.name) == "parameter":
            continue
        readers = [position[user] for user in node.users if user in position]
        nbytes = sum(v.numel() * v.element_size() for v in tensors_of(node) if isinstance(v, torch.Tensor))
        for place in range(start + 1, max(readers, default=start) + 1):
            crossing[place] += nbytes
    inside = [place for place in range(1, len(ops)) if crossing[place] and ops[place] in own]
    if not inside:
        return []
    least = min(crossing[place] for place in inside)
    return [place for place in inside if crossing[place] <= _SLACK * least]


def _best(sums: Sequence[float], places: Sequence[int], num_stages: int) -> list[int]:
    """Return the places that make the fullest of the contiguous stages least full, the earliest of equals."""
    starts = [0, *places]
    total = len(sums) - 1
    best = {start: (sums[total] - sums[start], (total,)) for start in starts}
    for _ in range(num_stages - 1):
        longer = {}
        for i, start in enumerate(starts):
            options = [
                (max(sums[cut] - sums[start], best[cut][0]), (cut, *best[cut][1]))
                for cut in starts[i + 1 :]
                if cut in best
            ]
            if options:
                longer[start] = min(options)
        best = longer
    return list(best[0][1][:-1])
