"""Normalisations that are kept whole: the normalised dims are not split, the leading ones are parallel."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar.passes import ops as _ops  # noqa: F401  (defines torch.ops.autopar)
from autopar.passes.program import tensor_operands
from autopar.passes.rules.form import (
    arguments,
    emit_with,
    letters,
    linear_groups,
    make_rule,
    operand_shapes,
    result_shapes,
)
from autopar.passes.rules.rule import LocalCall, Rule
from autopar.passes.rules.table import replicated_rule, rule

aten = torch.ops.aten


def _leading(node: fx.Node, shape: tuple[int, ...]) -> tuple[list[str | None], list[str | None]]:
    """Return the dims of a normalised tensor and of its statistics: leading dims named, normalised ones None."""
    inner = len(arguments(node)["normalized_shape"])
    lead = letters(len(shape) - inner)
    dims = [*lead, *[None] * inner]
    return dims, dims


@rule(aten.native_layer_norm.default, aten._fused_rms_norm.default)
def layer_norm(node: fx.Node) -> Rule:
    """A norm over the last dims, with its statistics."""
    shapes = operand_shapes(node)
    dims, _ = _leading(node, shapes[0])
    weights: list[list[str | None]] = [[None] * len(shape) for shape in shapes[1:]]
    results = result_shapes(node)
    return make_rule(node, [dims, *weights], [dims, *([*dims[: len(shape)]] for shape in results[1:])])


@rule(aten.native_layer_norm_backward.default)
def layer_norm_backward(node: fx.Node) -> Rule:
    """Its gradients: the weight's and the bias's are partial sums over the leading dims; linear in the gradient."""
    named = arguments(node)
    grad = named["grad_out"]
    full = tuple(grad.meta["val"].shape)
    dims, stats = _leading(node, full)
    operands: list[list[str | None]] = []
    for operand in tensor_operands(node):
        shape = tuple(operand.meta["val"].shape)
        if operand in (named.get("weight"), named.get("bias")) and len(shape) < len(full):
            operands.append([None] * len(shape))
        else:
            operands.append(stats[: len(shape)])
    wanted = list(named["output_mask"])
    results: list[list[str | None]] = [[None] * len(shape) for shape in result_shapes(node)]
    if wanted[0]:
        results[0] = dims
    return make_rule(
        node,
        operands,
        results,
        kinds={str(name): "sum" for name in dims if name},
        linear=linear_groups(node, (0,)),
    )


@rule(aten.native_group_norm.default)
def group_norm(node: fx.Node) -> Rule:
    """A norm over groups of channels: the batch and the groups are parallel."""
    shapes, group = operand_shapes(node), int(arguments(node)["group"])
    outer: list[str | None] = ["n", "g" if group > 1 else None]
    image = [*outer, *[None] * (len(shapes[0]) - 2)]

    def localize(call: LocalCall) -> Any:
        shape = call.result_shapes[0]
        local = call.pieces["g"].length if "g" in call.pieces else group
        return emit_with(call, N=shape[0], C=shape[1], HxW=math.prod(shape[2:]), group=local)

    return make_rule(
        node,
        [image, *([outer[1]] for _ in shapes[1:])],
        [image, outer, outer],
        sizes={"g": group} if group > 1 else {},
        even=["g"],
        roles={"n": "batch", "g": "channel"},
        localize=localize,
    )


@rule(aten.native_group_norm_backward.default)
def group_norm_backward(node: fx.Node) -> Rule:
    """Its gradients: the weight's and the bias's are partial sums over the batch."""
    named, group = arguments(node), int(arguments(node)["group"])
    outer: list[str | None] = ["n", "g" if group > 1 else None]
    image = [*outer, *[None] * (len(operand_shapes(node)[0]) - 2)]
    weight = [[outer[1]]] if named["weight"] is not None else []
    mask = list(named["output_mask"])

    def localize(call: LocalCall) -> Any:
        shape = call.operand_shapes[0]
        local = call.pieces["g"].length if "g" in call.pieces else group
        return emit_with(call, N=shape[0], C=shape[1], HxW=math.prod(shape[2:]), group=local)

    results = [dims for dims, wanted in zip((image, [outer[1]], [outer[1]]), mask) if wanted]
    return make_rule(
        node,
        [image, image, outer, outer, *weight],
        results,
        kinds={"n": "sum"},
        sizes={"g": group} if group > 1 else {},
        even=["g"],
        roles={"n": "batch", "g": "channel"},
        linear=linear_groups(node, (0,)),
        localize=localize,
    )


@rule(
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit.no_stats,
)
def batch_norm(node: fx.Node) -> Rule:
    """A batch norm kept whole: channels are parallel; with given statistics the batch is too."""
    shapes = operand_shapes(node)
    if len(shapes[0]) < 2:
        return replicated_rule(node, "a batch norm of fewer than two dims")
    fixed = node.target is aten._native_batch_norm_legit_no_training.default
    rest: list[str | None] = [*letters(len(shapes[0]) - 2, "s")] if fixed else [None] * (len(shapes[0]) - 2)
    image = ["n" if fixed else None, "c", *rest]
    same = [(str(name), i) for name in image if name != "c" for i in range(1, len(result_shapes(node)))]
    results = [
        image,
        *(["c"] if shape == (shapes[0][1],) else [None] * len(shape) for shape in result_shapes(node)[1:]),
    ]
    if any(dims != ["c"] for dims in results[1:]):
        same += [("c", i) for i, dims in enumerate(results) if i and dims != ["c"]]
    return make_rule(
        node, [image, *(["c"] for _ in shapes[1:])], results, roles={"c": "channel", "n": "batch"}, same=same
    )


_ROLES = {"n": "batch", "c": "channel"}


def _image(node: fx.Node) -> list[str | None]:
    rank = max(len(shape) for shape in operand_shapes(node))
    return ["n", "c", *letters(rank - 2, "s")]


def _summed(image: list[str | None]) -> dict[str, str]:
    return {str(name): "sum" for name in image if name != "c"}


@rule(torch.ops.autopar.moments.default)
def moments(node: fx.Node) -> Rule:
    """The sums that the statistics of a batch norm are read from: partial over the batch and over space."""
    image = _image(node)
    return make_rule(node, [image], [[None, "c"]], kinds=_summed(image), roles=_ROLES)


@rule(torch.ops.autopar.statistics.default)
def statistics(node: fx.Node) -> Rule:
    """The statistics that moments say: channels are parallel."""
    return make_rule(node, [[None, "c"]], [["c"], ["c"], ["c"]], roles=_ROLES)


@rule(torch.ops.autopar.normalise.default)
def normalise(node: fx.Node) -> Rule:
    """A batch norm by given statistics: everything is parallel."""
    image = _image(node)
    return make_rule(node, [image, *(["c"] for _ in operand_shapes(node)[1:])], [image], roles=_ROLES)


@rule(torch.ops.autopar.normalise_sums.default)
def normalise_sums(node: fx.Node) -> Rule:
    """Sums of a gradient over the batch and over space, which are partial over them; linear in the gradient."""
    image = _image(node)
    return make_rule(
        node,
        [image, image, ["c"], ["c"]],
        [[None, "c"]],
        kinds=_summed(image),
        roles=_ROLES,
        linear=linear_groups(node, (0,)),
    )


@rule(torch.ops.autopar.normalise_backward.default)
def normalise_backward(node: fx.Node) -> Rule:
    """The gradient of what was normalised: everything is parallel; linear in the gradient with its sums."""
    image, last = _image(node), len(operand_shapes(node)) - 1
    channels: list[list[str | None]] = [["c"] for _ in operand_shapes(node)[2:-1]]
    return make_rule(
        node,
        [image, image, *channels, [None, "c"]],
        [image],
        roles=_ROLES,
        linear=linear_groups(node, (1, last)),
    )
