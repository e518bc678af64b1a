"""Hand-written recipes as constraints on any program: data parallel, ZeRO, Megatron, sequence, two-dimensional.

Nothing here knows a model: what is a batch or a sequence is followed through the rules, and Megatron's pairs are found
by ``benchmarks/pair_products.py``. What a recipe leaves open (the backward, along which dim a parameter is cut, masks
and positions) the solver fills in, so that a recipe is priced at its best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.passes.name_roles import FactorRoles, name_roles
from autopar.passes.program import Program, result_values
from autopar.passes.redistribution import layout_is_legal
from autopar.passes.rules.rule import Rule
from autopar.placement import REPLICATE
from benchmarks.pair_products import Pairs, pair_products


class Inexpressible(AutoparError):
    """A recipe that a program or a mesh has no room for."""


@dataclass(frozen=True)
class Recipe:
    """What a hand-written recipe does with the axes of a mesh.

    Attributes:
        title: its usual name.
        model: the last axis splits pairs of products by columns and rows; the other axes, or without it all, the batch.
        sequence: between the pairs the last axis splits the sequence.
        zero: on the axes of the batch parameters rest whole (0) or split, and what is gathered for the forward is kept
            for the backward: always (2; with one micro-batch ZeRO-1 is the same), or where memory allows (3).
        inside: parameters rest split on the last axis of the batch only.
    """

    title: str
    model: bool = False
    sequence: bool = False
    zero: int = 0
    inside: bool = False


RECIPES: tuple[Recipe, ...] = (
    Recipe("DDP"),
    Recipe("ZeRO-1/2", zero=2),
    Recipe("ZeRO-3", zero=3),
    Recipe("ZeRO-3 inside nodes", zero=3, inside=True),
    Recipe("Megatron", model=True),
    Recipe("Megatron + sequence", model=True, sequence=True),
    Recipe("FSDP x Megatron", model=True, zero=3),
    Recipe("FSDP x Megatron + sequence", model=True, sequence=True, zero=3),
)


def recipe_constraints(program: Program, mesh: Mesh, recipe: Recipe) -> dict[str, str]:
    """Return a recipe as constraints on an annotated program.

    Raises:
        Inexpressible: the batch does not divide, there is no pair of products, or the mesh has too few axes.
    """
    data = [a for a in range(mesh.num_axes - recipe.model) if mesh.sizes[a] > 1]
    if recipe.model and mesh.sizes[-1] == 1:
        raise Inexpressible("the last axis has one rank")
    if (recipe.model and recipe.zero and not data) or (recipe.inside and len(data) < 2):
        raise Inexpressible("needs two axes")
    roles = name_roles(program)
    asked: dict[str, list[str]] = {}
    _split_batch(program, mesh, roles, data, asked)
    if recipe.model:
        pairs = pair_products(program, roles, mesh.sizes[-1])
        if not pairs.rows:
            raise Inexpressible(f"no pair of products that {mesh.sizes[-1]} ranks can split")
        _split_pairs(program, mesh, roles, pairs, recipe.sequence, asked)
    _rest(program, mesh, data, recipe, asked)
    return {pattern: "; ".join(texts) for pattern, texts in asked.items()}


def _split_batch(
    program: Program, mesh: Mesh, roles: FactorRoles, data: list[int], asked: dict[str, list[str]]
) -> None:
    """Ask every op over the batch to split it on all axes of the batch.

    Masks, indices and counts are left open: nobody splits these by hand, and the peer of data parallelism sends none.
    """
    parts = math.prod(mesh.sizes[axis] for axis in data)
    nodes = program.nodes()
    values = [nodes[role.node].meta["val"] for role in program.inputs if role.kind == "input"]
    batch = min((x.shape[0] for x in values if isinstance(x, torch.Tensor) and x.dim()), default=1)
    if batch % parts:
        raise Inexpressible(f"a batch of {batch} on {parts} ranks")
    for node in program.ops() if data else ():
        if node.meta["phase"] != "forward" or not any(val.is_floating_point() for _, val in result_values(node)):
            continue
        if _splits(node.meta["rule"], roles.get(node.name, {}), "batch", parts):
            asked.setdefault(f"op:{node.name}", []).extend(f"batch@{mesh.names[axis]}" for axis in data)


def _splits(rule: Rule, roles: Mapping[str, str], word: str, parts: int) -> bool:
    """Tell whether an op has a factor called ``word`` that ``parts`` ranks split evenly."""
    named = [factor for factor in rule.factors if roles.get(factor.name) == word]
    choices = {choice.name for choice in rule.choices()}
    return any(factor.size % parts == 0 and factor.name in choices for factor in named)


def _split_pairs(
    program: Program, mesh: Mesh, roles: FactorRoles, pairs: Pairs, sequence: bool, asked: dict[str, list[str]]
) -> None:
    """Ask the pairs for their factors, and all other activations to be whole or split by the sequence."""
    axis = mesh.names[-1]
    for node in program.ops():
        if node.meta["phase"] != "forward" or node.name in pairs.inside:
            continue
        if node.name in pairs.factors:
            text = pairs.factors[node.name]
        elif node.name not in pairs.active:
            continue
        elif sequence and _splits(node.meta["rule"], roles.get(node.name, {}), "sequence", mesh.sizes[-1]):
            text = "sequence"
        else:
            text = "replicate"
        asked.setdefault(f"op:{node.name}", []).append(f"{text}@{axis}")


def _rest(program: Program, mesh: Mesh, data: list[int], recipe: Recipe, asked: dict[str, list[str]]) -> None:
    """Ask parameters to rest whole or split on the axes of the batch."""
    nodes = program.nodes()
    wanted = data[-1:] if recipe.inside else data
    for role in program.inputs:
        if role.kind != "parameter":
            continue
        shape = tuple(nodes[role.node].meta["val"].shape)
        cut: list[int] = []
        for axis in reversed(wanted if recipe.zero else []):
            if _can_rest(shape, mesh, [axis, *cut]):
                cut.insert(0, axis)
        texts = [f"zero{3 if axis in cut else 0}@{mesh.names[axis]}" for axis in data]
        if texts:
            asked.setdefault(role.name, []).extend(texts)


def _can_rest(shape: tuple[int, ...], mesh: Mesh, axes: list[int]) -> bool:
    """Tell whether a parameter can be cut over all these axes, along one dim."""
    layouts = (tuple(dim if a in axes else REPLICATE for a in range(mesh.num_axes)) for dim in range(len(shape)))
    return any(layout_is_legal(shape, layout, mesh.sizes) for layout in layouts)
