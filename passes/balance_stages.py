"""Cut a program into stages of about equal work where little crosses: what is done when nobody says where to cut."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch
from torch import fx

from autopar.errors import OptionError

from .program import Program, is_random, tensors_of

_SLACK = 1.5
"""A cut may carry this many times the bytes of a middling one."""


def balance_stages(program: Program, num_stages: int) -> tuple[str, ...]:
    """Return the cuts of ``num_stages`` contiguous stages (``assign_stages``) whose fullest has the least work.

    Work is the flops of the forward, its elements where an op has none, and stages start where modules start and no
    more bytes cross than usual, or anywhere when there are too few such places.

    Raises:
        OptionError: the program has too few places to cut.
    """
    if num_stages == 1:
        return ()
    ops = [node for node in program.ops() if node.meta["phase"] == "forward"]
    work = [_work(node) for node in ops]
    crossing = _crossing(program, ops)
    inside = [place for place in range(1, len(ops)) if crossing[place]]
    named = [place for place in inside if name_cut(ops, place) != ops[place].name]
    usual = median([crossing[place] for place in named]) if named else 0
    places = [place for place in named if crossing[place] <= _SLACK * usual]
    places = places if len(places) >= num_stages - 1 else inside
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


def _crossing(program: Program, ops: Sequence[fx.Node]) -> list[int]:
    """Return the bytes that cross a cut before each op; what depends on inputs alone is computed again instead."""
    position = {node: i for i, node in enumerate(ops)}
    kinds = {role.node: role.kind for role in program.inputs}
    own: set[fx.Node] = set()
    crossing = [0] * (len(ops) + 1)
    first: dict[fx.Node, int] = {}
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
    return crossing


def _best(sums: Sequence[float], places: Sequence[int], num_stages: int) -> list[int]:
    """Return the places that make the fullest of the contiguous stages least full, the earliest of equals."""
    starts = [0, *places]
    total = len(sums) - 1
    best: dict[int, tuple[float, tuple[int, ...]]] = {s: (sums[total] - sums[s], (total,)) for s in starts}
    for _ in range(num_stages - 1):
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
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
