"""Arguments for convolutions and pools."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.strategies.op_draws import WIDE, Arguments, Draw, generates

aten = torch.ops.aten


def _convolution(d: Draw) -> tuple[Tensor, Tensor, Tensor | None, list[Any]]:
    """Draw the operands of a convolution and the arguments after the bias."""
    groups, transposed, space = d.of([1, 1, 1, 2, 3, 4]), d.int(0, 3) == 0, d.int(1, 2)
    small = [1, 2, 3, 4, 6]
    c, o = (groups * d.of(small), groups * d.of(small))
    kernel = [d.int(1, 3) for _ in range(space)]
    x = d.float(d.of(small), c, *[d.int(3, 6) for _ in range(space)])
    weight = d.float(*((c, o // groups) if transposed else (o, c // groups)), *kernel)
    rest = [[d.int(1, 2)] * space, [d.int(0, 1)] * space, [1] * space, transposed, [0] * space, groups]
    return x, weight, d.of([None, d.float(o)]), rest


def enter_images() -> None:
    """Enter the generators of the convolution family."""

    @generates(aten.convolution.default, dtypes=WIDE)
    def convolution(d: Draw) -> Arguments:
        x, weight, bias, rest = _convolution(d)
        return (x, weight, bias, *rest), {}

    @generates(aten.convolution_backward.default, dtypes=WIDE)
    def convolution_backward(d: Draw) -> Arguments:
        x, weight, bias, rest = _convolution(d)
        out = aten.convolution(x, weight, bias, *rest)
        mask = [d.bool(), True, bias is not None]
        sizes = None if bias is None else list(bias.shape)
        return (d.float(*out.shape), x, weight, sizes, *rest, mask), {}

    def image(d: Draw, space: int = 2) -> Tensor:
        """Draw images, sometimes without a batch."""
        return d.float(*d.shape(1, 2), *[d.int(4, 6) for _ in range(space)])

    @generates(aten.max_pool2d_with_indices.default, aten.avg_pool2d.default, dtypes=WIDE)
    def pool(d: Draw) -> Arguments:
        return (image(d), [2, 2], [d.int(1, 2)] * 2, [d.int(0, 1)] * 2), {}

    @generates(aten.max_pool3d_with_indices.default, aten.avg_pool3d.default, dtypes=WIDE)
    def pool_of_volumes(d: Draw) -> Arguments:
        return (image(d, 3), [2, 2, 2], [2, 1, 2]), {}

    @generates(aten.avg_pool1d.default, dtypes=WIDE)
    def pool_of_lines(d: Draw) -> Arguments:
        return (image(d, 1), [2], [d.int(1, 2)]), {}

    @generates(aten.max_pool2d_with_indices_backward.default, dtypes=WIDE)
    def pool_backward(d: Draw) -> Arguments:
        x = image(d)
        out, at = aten.max_pool2d_with_indices(x, [2, 2], [2, 2])
        return (d.float(*out.shape), x, [2, 2], [2, 2], [0, 0], [1, 1], False, at), {}

    @generates(aten.max_pool3d_with_indices_backward.default, dtypes=WIDE)
    def pool_of_volumes_backward(d: Draw) -> Arguments:
        x = image(d, 3)
        out, at = aten.max_pool3d_with_indices(x, [2, 2, 2], [2, 2, 2])
        return (d.float(*out.shape), x, [2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False, at), {}

    @generates(aten.avg_pool2d_backward.default, dtypes=WIDE)
    def avg_pool_backward(d: Draw) -> Arguments:
        x = image(d)
        out = aten.avg_pool2d(x, [2, 2], [2, 2])
        return (d.float(*out.shape), x, [2, 2], [2, 2], [0, 0], False, True, None), {}

    @generates(aten._adaptive_avg_pool2d.default, aten.adaptive_max_pool2d.default, dtypes=WIDE)
    def adaptive(d: Draw) -> Arguments:
        return (image(d), [d.int(1, 3), 2]), {}

    @generates(aten._adaptive_avg_pool3d.default, dtypes=WIDE)
    def adaptive_volumes(d: Draw) -> Arguments:
        return (image(d, 3), [1, 2, 2]), {}

    @generates(aten._adaptive_avg_pool2d_backward.default, dtypes=WIDE)
    def adaptive_backward(d: Draw) -> Arguments:
        x = image(d)
        return (d.float(*x.shape[:-2], 2, 2), x), {}

    @generates(aten.adaptive_max_pool2d_backward.default, dtypes=WIDE)
    def adaptive_max_backward(d: Draw) -> Arguments:
        x = image(d)
        out, at = aten.adaptive_max_pool2d(x, [2, 2])
        return (d.float(*out.shape), x, at), {}

    def batch(d: Draw) -> Tensor:
        return d.float(d.size(), d.size(), d.int(2, 4), d.int(2, 4))

    @generates(aten.upsample_nearest2d.vec, dtypes=WIDE)
    def nearest_vec(d: Draw) -> Arguments:
        return (batch(d), [5, 6], None), {}

    @generates(aten.upsample_bilinear2d.vec, dtypes=WIDE)
    def bilinear_vec(d: Draw) -> Arguments:
        return (batch(d), [5, 6], False, None), {}

    @generates(aten.upsample_nearest2d.default, dtypes=WIDE)
    def nearest(d: Draw) -> Arguments:
        return (batch(d), [5, 6]), {}

    @generates(aten.upsample_bilinear2d.default, dtypes=WIDE)
    def bilinear(d: Draw) -> Arguments:
        return (batch(d), [5, 6], False), {}

    @generates(aten.upsample_nearest2d_backward.default, dtypes=WIDE)
    def nearest_backward(d: Draw) -> Arguments:
        x = batch(d)
        return (d.float(*x.shape[:2], 5, 6), [5, 6], list(x.shape)), {}

    @generates(aten.upsample_bilinear2d_backward.default, dtypes=WIDE)
    def bilinear_backward(d: Draw) -> Arguments:
        x = batch(d)
        return (d.float(*x.shape[:2], 5, 6), [5, 6], list(x.shape), False), {}

    @generates(aten.reflection_pad2d.default, aten.replication_pad2d.default, dtypes=WIDE)
    def pad(d: Draw) -> Arguments:
        return (image(d), [1, 0, 1, 1]), {}

    @generates(aten.reflection_pad1d.default, dtypes=WIDE)
    def pad_lines(d: Draw) -> Arguments:
        return (image(d, 1), [1, 1]), {}
