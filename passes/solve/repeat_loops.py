"""Weigh what runs once a micro-batch by how often it runs."""

from __future__ import annotations

from dataclasses import replace

from autopar.passes.micro_batches import INDEX, varying
from autopar.passes.program import Program

from .layout_graph import LayoutGraph
from .problem import Decision, Network, Problem


def repeat_loops(problem: Problem, program: Program) -> Problem:
    """Return the problem with the seconds of a step: ops and moves of each micro-batch count for all of them.

    What does not depend on the micro-batch counts once: gradients that are reduced after the last one, parameters that
    are gathered before the first and kept. Bytes stay those of one micro-batch.
    """
    count = program.micro_batches
    if count == 1:
        return problem
    moves = {node.name for node, each in varying(program.graph, {INDEX: None}).items() if each}
    scaled: dict[int, LayoutGraph] = {}

    def decision(one: Decision) -> Decision:
        if one.name not in moves:
            return one
        return replace(one, strategies=replace(one.strategies, seconds=one.strategies.seconds * count))

    def network(one: Network) -> Network:
        if one.tensor not in moves:
            return one
        graph = scaled.get(id(one.graph))
        if graph is None:
            graph = scaled[id(one.graph)] = replace(one.graph, seconds=one.graph.seconds * count)
        return replace(one, graph=graph)

    return replace(
        problem,
        decisions=tuple(decision(one) for one in problem.decisions),
        networks=tuple(network(one) for one in problem.networks),
    )
