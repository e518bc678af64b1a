"""Contractions: matrix products and two-operand einsums."""

from __future__ import annotations

import math

import torch
from torch import fx

from autopar.passes import ops as _ops  # noqa: F401  (defines torch.ops.autopar)
from autopar.passes.program import tensor_operands
from autopar.passes.rules.form import (
    arguments,
    call_arguments,
    emit_with,
    linear_groups,
    make_rule,
    operand_shapes,
    shape_of,
)
from autopar.passes.rules.rule import LocalCall, Localize, Rule
from autopar.passes.rules.table import replicated_rule, rule

aten = torch.ops.aten


def einsum_rule(node: fx.Node, inputs: list[str], output: str) -> Rule:
    """Return the rule of ``inputs -> output``, one letter a dim; letters that the output lacks are summed."""
    shapes = operand_shapes(node)
    sizes = {letter: size for text, shape in zip(inputs, shapes) for letter, size in zip(text, shape)}
    return make_rule(
        node,
        [list(text) for text in inputs],
        [list(output)],
        kinds={letter: "sum" for letter in sizes if letter not in output},
        roles=_roles(node, inputs, output),
        linear=linear_groups(node, *((i,) for i in range(len(inputs)))),
        flops=2.0 * math.prod(sizes.values()),
    )


def _roles(node: fx.Node, inputs: list[str], output: str) -> dict[str, str]:
    """Name the factors of a product with a weight (the second operand is a matrix) in the forward."""
    if len(inputs) != 2 or len(inputs[1]) != 2 or node.meta.get("phase") == "backward":
        return {}
    first, second = inputs
    roles = {letter: "row" for letter in second if letter not in output and letter in first}
    columns = [letter for letter in second if letter in output and letter not in first]
    if len(roles) != 1 or len(columns) != 1:
        return {}
    return {**roles, columns[0]: "column"}


@rule(torch.ops.autopar.contract.default)
def contract(node: fx.Node) -> Rule:
    """``abk,nk->abn``: every letter is a factor, the summed ones reductions."""
    left, output = str(arguments(node)["equation"]).replace(" ", "").split("->")
    return einsum_rule(node, left.split(","), output)


@rule(aten.mm.default, aten.bmm.default, aten.dot.default, aten.mv.default)
def matrix_product(node: fx.Node) -> Rule:
    """The fixed products: ``mk,kn->mn`` and its kin."""
    left, output = {"mm": ("mk,kn", "mn"), "bmm": ("bmk,bkn", "bmn"), "dot": ("k,k", ""), "mv": ("mk,k", "m")}[
        node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    ]
    return einsum_rule(node, left.split(","), output)


@rule(aten.einsum.default)
def einsum(node: fx.Node) -> Rule:
    """An einsum of distinct letters; other equations are replicated."""
    equation = str(node.args[0]).replace(" ", "")
    inputs = equation.split("->")[0].split(",")
    plain = "->" in equation and "." not in equation and all(len(set(text)) == len(text) for text in inputs)
    if not plain or len(inputs) != len(tensor_operands(node)):
        return replicated_rule(node, f"an einsum of the form {equation!r}")
    output = equation.split("->")[1]
    counts = {letter: sum(letter in text for text in inputs) for letter in equation if letter.isalpha()}
    if len(inputs) > 1 and any(counts[letter] == 1 for letter in counts if letter not in output):
        return replicated_rule(node, f"an einsum that sums a letter of one operand: {equation!r}")
    return einsum_rule(node, inputs, output)


@rule(aten.matmul.default)
def matmul(node: fx.Node) -> Rule:
    """A product whose leading dims agree; broadcast ones are None where they have size 1."""
    a, b = operand_shapes(node)[:2]
    if len(a) < 2 or len(b) < 2:
        return replicated_rule(node, "a matmul with a vector")
    lead = [f"b{i}" for i in range(max(len(a), len(b)) - 2)]
    first: list[str | None] = [*lead[len(lead) - len(a) + 2 :], "m", "k"]
    second: list[str | None] = [*lead[len(lead) - len(b) + 2 :], "k", "n"]
    full = shape_of(node)
    for dims, shape in ((first, a), (second, b)):
        for i in range(len(shape) - 2):
            if shape[i] != full[len(full) - len(shape) + i]:
                dims[i] = None
    return make_rule(
        node,
        [first, second],
        [[*lead, "m", "n"]],
        kinds={"k": "sum"},
        linear=linear_groups(node, (0,), (1,)),
        flops=2.0 * math.prod(full) * a[-1],
    )


def _only_first(call: LocalCall, name: str, factor: str) -> dict[str, object]:
    """Zero the addend called ``name`` on every piece of the summed ``factor`` but the first, so that it counts once."""
    addend = call_arguments(call)[name]
    piece = call.pieces.get(factor)
    if addend is None or piece is None or piece.parts == 1:
        return {}
    return {name: call.emit(aten.mul.Tensor, addend, 1.0 if piece.offset == 0 else 0.0)}


def _added_once(name: str) -> Localize:
    def localize(call: LocalCall) -> object:
        return emit_with(call, **_only_first(call, name, "k"))

    return localize


@rule(aten.addmm.default, aten.baddbmm.default, aten.addmv.default, aten.addbmm.default)
def added_product(node: fx.Node) -> Rule:
    """A product with an addend that broadcasts over the result; a split of the sum counts the addend once."""
    name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    inputs, output = {
        "addmm": (["mk", "kn"], "mn"),
        "baddbmm": (["bmk", "bkn"], "bmn"),
        "addmv": (["mk", "k"], "m"),
        "addbmm": (["bmk", "bkn"], "mn"),
    }[name]
    addend, full = operand_shapes(node)[0], shape_of(node)
    lead = len(full) - len(addend)
    dims = [output[lead + i] if size == full[lead + i] else None for i, size in enumerate(addend)]
    if name == "addbmm":
        return replicated_rule(node, "addbmm sums its batch")
    return make_rule(
        node,
        [dims, *(list(text) for text in inputs)],
        [list(output)],
        kinds={"k": "sum"},
        linear=linear_groups(node, (0, 1), (0, 2)),
        localize=_added_once("self"),
        flops=2.0 * math.prod(full) * operand_shapes(node)[1][-1],
    )


@rule(aten.linear.default)
def linear(node: fx.Node) -> Rule:
    """``x w^T + b``: leading dims parallel, ``k`` summed, ``n`` the weight's columns."""
    shapes = operand_shapes(node)
    if len(shapes[1]) != 2 or not shapes[0]:
        return replicated_rule(node, "a linear with a vector weight")
    lead = [f"b{i}" for i in range(len(shapes[0]) - 1)]
    bias = len(shapes) == 3
    groups = ((0, 2), (1, 2)) if bias else ((0,), (1,))
    return make_rule(
        node,
        [[*lead, "k"], ["n", "k"], *([["n"]] if bias else [])],
        [[*lead, "n"]],
        kinds={"k": "sum"},
        roles={"k": "row", "n": "column"},
        linear=linear_groups(node, *groups),
        localize=_added_once("bias"),
        flops=2.0 * math.prod(shapes[0]) * shapes[1][0],
    )
