"""Find what can travel while a region computes: parameters ahead of their use, gradients behind the backward.

A transfer can hide when nothing that computes waits for it, or when it waits for nothing that computes. The first is
true of a tensor from which only gradients follow, by ops that are bound by memory traffic; the second of one that
follows from parameters and buffers alone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from .cost.collectives import Company
from .find_regions import find_regions, region_of
from .micro_batches import INDEX, varying
from .program import Program, is_getitem, is_random, result_values


@dataclass(frozen=True)
class Hideable:
    """What may hide, and behind what.

    Attributes:
        regions: the region of every node, whose compute it is part of.
        tensors: the tensors whose transfers may hide behind the compute of their region.
    """

    regions: dict[str, int]
    tensors: frozenset[str]


def find_hideable(program: Program) -> Hideable:
    """Return the regions of an annotated program, and the tensors whose transfers can hide behind their compute.

    In a program of a micro-batch that runs several times, only what travels every time can: what travels once, before
    the first or after the last, finds nothing to hide behind.
    """
    ahead, behind = _known_ahead(program), _waited_by_nobody(program)
    tensors = ahead | behind
    if program.micro_batches > 1:
        tensors &= {node.name for node, each in varying(program.graph, {INDEX: None}).items() if each}
    return Hideable(region_of(program, find_regions(program)), frozenset(tensors))


def find_bucketed(program: Program, disable: Collection[str] = ()) -> dict[str, Company]:
    """Return the tensors that travel with others of their kind as one: parameters ahead of use, gradients behind.

    Args:
        program: annotated.
        disable: passes over the lowered program that will not run.
    """
    if "bucket_collectives" in disable:
        return {}
    behind = _waited_by_nobody(program)
    together = sorted(_known_ahead(program) | behind)
    nodes = program.nodes()
    ends = {role.node for role in program.outputs if role.kind == "gradient" and role.node in behind}
    whole = sum(_bytes(nodes[name]) for name in ends)
    return {
        name: Company(len(together), min(1.0, _bytes(nodes[name]) / whole) if name in behind else 0.0)
        for name in together
    }


def _bytes(node: fx.Node) -> int:
    return sum(value.nbytes for _, value in result_values(node))


def _known_ahead(program: Program) -> set[str]:
    """Return parameters, buffers, and what follows from them alone."""
    found = {role.node for role in program.inputs if role.kind in ("parameter", "buffer")}
    for node in program.graph.nodes:
        operands = node.all_input_nodes
        made = node.op == "call_function" and not is_random(node)
        if made and operands and all(operand.name in found for operand in operands):
            found.add(node.name)
    return found


def _waited_by_nobody(program: Program) -> set[str]:
    """Return the tensors of the backward from which only gradients follow, by ops bound by memory traffic."""
    ends = {role.node for role in program.outputs if role.kind == "gradient"}
    others = {role.node for role in program.outputs if role.kind != "gradient"}
    found: set[str] = set()
    for node in reversed(list(program.graph.nodes)):
        if node.op != "call_function" or node.meta.get("phase") != "backward" or node.name in others:
            continue
        readers = [user for user in node.users if user.op != "output"]
        if (readers or node.name in ends) and all(user.name in found and not _computes(user) for user in readers):
            found.add(node.name)
    return found


def _computes(node: fx.Node) -> bool:
    return not is_getitem(node) and node.meta["rule"].flops > 0
