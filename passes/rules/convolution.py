"""Convolutions: batch and channels are split, space is not."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar.passes.rules.form import (
    arguments,
    call_arguments,
    emit_with,
    linear_groups,
    make_rule,
    operand_shapes,
    result_shapes,
    shape_of,
)
from autopar.passes.rules.rule import LocalCall, Rule
from autopar.passes.rules.table import replicated_rule, rule

aten = torch.ops.aten

Dims = list[str | None]
ROLES = {"n": "batch", "o": "channel", "c": "channel", "g": "channel"}


def _channels(groups: int, transposed: bool) -> tuple[str | None, str | None, Dims]:
    """Return the factors of the input's channels, of the output's, and of the weight's first two dims.

    Channels of several groups are cut by whole groups; the channels inside a group are not split.
    """
    if groups > 1:
        return "g", "g", ["g", None]
    return "c", "o", ["c", "o"] if transposed else ["o", "c"]


def _flops(weight: tuple[int, ...], pixels: tuple[int, ...]) -> float:
    """Return the operations of one convolution: two a weight and pixel of the side that the kernel is laid on."""
    return 2.0 * math.prod(weight) * pixels[0] * math.prod(pixels[2:])


def _local_groups(call: LocalCall) -> dict[str, Any]:
    piece = call.pieces.get("g")
    return {} if piece is None else {"groups": piece.length}


def _localize(call: LocalCall) -> Any:
    """Convolve with the local groups; a split of the summed channels counts the bias once."""
    changes = _local_groups(call)
    bias, piece = call_arguments(call)["bias"], call.pieces.get("c")
    if bias is not None and piece is not None and piece.parts > 1:
        changes["bias"] = call.emit(aten.mul.Tensor, bias, 1.0 if piece.offset == 0 else 0.0)
    return emit_with(call, **changes)


@rule(aten.convolution.default)
def convolution(node: fx.Node) -> Rule:
    """A convolution: input channels are a sum, output channels the weight's."""
    named, shapes = arguments(node), operand_shapes(node)
    rank = len(shapes[1])
    if len(shapes[0]) != rank or rank < 3:
        return replicated_rule(node, "a convolution without a batch")
    groups, transposed = int(named["groups"]), bool(named["transposed"])
    c, o, weight = _channels(groups, transposed)
    space: Dims = [None] * (rank - 2)
    bias = named["bias"] is not None
    return make_rule(
        node,
        [["n", c, *space], [*weight, *space], *([[o]] if bias else [])],
        [["n", o, *space]],
        kinds={"c": "sum"},
        sizes={"g": groups} if groups > 1 else {},
        even=["g"],
        roles=ROLES,
        linear=linear_groups(node, *(((0, 2), (1, 2)) if bias else ((0,), (1,)))),
        localize=_localize,
        flops=_flops(shapes[1], shapes[0] if transposed else shape_of(node)),
    )


def _localize_backward(call: LocalCall) -> Any:
    changes = _local_groups(call)
    named = call_arguments(call)
    if named["bias_sizes"] is not None and named["output_mask"][2]:
        changes["bias_sizes"] = list(call.result_shapes[-1])
    return emit_with(call, **changes)


@rule(aten.convolution_backward.default)
def convolution_backward(node: fx.Node) -> Rule:
    """Its gradients: the weight's and the bias's are sums over the batch, the input's over the output channels."""
    named, shapes = arguments(node), operand_shapes(node)
    rank = len(shapes[2])
    if len(shapes[1]) != rank or rank < 3:
        return replicated_rule(node, "a convolution without a batch")
    groups, transposed = int(named["groups"]), bool(named["transposed"])
    c, o, weight = _channels(groups, transposed)
    space: Dims = [None] * (rank - 2)
    image: Dims = ["n", c, *space]
    mask = list(named["output_mask"])
    results = [dims for dims, wanted in zip((image, [*weight, *space], [o]), mask) if wanted]
    pixels = shapes[1] if transposed else shapes[0]
    return make_rule(
        node,
        [["n", o, *space], image, [*weight, *space]],
        results,
        kinds={"n": "sum", "o": "sum"},
        sizes={"g": groups} if groups > 1 else {},
        even=["g"],
        roles=ROLES,
        same=[("c", len(results) - 1)] if mask[2] else (),
        linear=linear_groups(node, (0,)),
        localize=_localize_backward,
        flops=_flops(shapes[2], pixels) * sum(mask[:2]),
    )


def leading(shape: tuple[int, ...], inner: int) -> Dims:
    """Return the dims of images: all but the ``inner`` last ones named ``n`` and ``c``, from the right."""
    names: Dims = [*(f"m{i}" for i in range(len(shape) - inner - 2)), "n", "c"]
    return [*names[len(names) - (len(shape) - inner) :], *[None] * inner]


def _pooling(node: fx.Node, inner: int, linear: bool, sizes: str = "") -> Rule:
    """Return the rule of an op that works on each image plane alone.

    Args:
        sizes: the argument that holds the result's whole shape, if there is one.
    """

    def localize(call: LocalCall) -> Any:
        return emit_with(call, **({sizes: list(call.result_shapes[0])} if sizes else {}))

    return make_rule(
        node,
        [leading(shape, inner) for shape in operand_shapes(node)],
        [leading(shape, inner) for shape in result_shapes(node)],
        roles=ROLES,
        linear=linear_groups(node, (0,)) if linear else (),
        localize=localize if sizes else None,
    )


@rule(aten.max_pool2d_with_indices.default, aten.adaptive_max_pool2d.default)
def max_pool(node: fx.Node) -> Rule:
    """A maximum over windows, with its positions inside each plane."""
    return _pooling(node, 2, linear=False)


@rule(
    aten.max_pool2d_with_indices_backward.default,
    aten.avg_pool2d.default,
    aten.avg_pool2d_backward.default,
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten.adaptive_max_pool2d_backward.default,
    aten.upsample_nearest2d.vec,
    aten.upsample_bilinear2d.vec,
    aten.upsample_nearest2d.default,
    aten.upsample_bilinear2d.default,
    aten.reflection_pad2d.default,
    aten.replication_pad2d.default,
)
def linear_pool(node: fx.Node) -> Rule:
    """A mean, an interpolation or a gradient on each plane: linear in the first operand."""
    return _pooling(node, 2, linear=True)


@rule(aten.avg_pool1d.default, aten.reflection_pad1d.default)
def linear_pool_of_lines(node: fx.Node) -> Rule:
    """The same on each line."""
    return _pooling(node, 1, linear=True)


@rule(aten.max_pool3d_with_indices.default)
def max_pool_of_volumes(node: fx.Node) -> Rule:
    """A maximum over windows of each volume."""
    return _pooling(node, 3, linear=False)


@rule(
    aten.max_pool3d_with_indices_backward.default,
    aten.avg_pool3d.default,
    aten._adaptive_avg_pool3d.default,
)
def linear_pool_of_volumes(node: fx.Node) -> Rule:
    """The same as ``linear_pool`` on each volume."""
    return _pooling(node, 3, linear=True)


@rule(aten.upsample_nearest2d_backward.default, aten.upsample_bilinear2d_backward.default)
def upsample_backward(node: fx.Node) -> Rule:
    """The gradient of an interpolation: the whole shape of the input is an argument."""
    return _pooling(node, 2, linear=True, sizes="input_size")
