"""Arguments for views and slices."""

from __future__ import annotations

import torch

from tests.strategies.op_draws import WIDE, Arguments, Draw, broadcast, generates

aten = torch.ops.aten


def enter_views() -> None:
    """Enter the generators of the views family."""

    def reshaped(d: Draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Draw two shapes of the same number of elements: dims of the first are merged, split or moved into ones."""
        shape = d.shape(0, 4)
        out: list[int] = []
        for size in shape:
            action = d.int(0, 4)
            if action == 0 and out:
                out[-1] *= size
            elif action == 1 and size % 2 == 0:
                out += d.of([[2, size // 2], [size // 2, 2]])
            elif action == 2:
                out += [1, size]
            else:
                out.append(size)
        other = tuple(out)
        return (shape, other) if d.bool() else (other, shape)

    @generates(
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten._reshape_copy.default,
        aten.view_copy.default,
    )
    def view(d: Draw) -> Arguments:
        source, target = reshaped(d)
        sizes = list(target)
        if sizes and d.bool():
            sizes[d.int(0, len(sizes) - 1)] = -1
        return (d.float(*source), sizes), {}

    @generates(aten.squeeze.default)
    def squeeze(d: Draw) -> Arguments:
        return (d.float(*d.shape()),), {}

    @generates(aten.squeeze.dim)
    def squeeze_dim(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, d.dim(x.dim())), {}

    @generates(aten.squeeze.dims)
    def squeeze_dims(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, sorted({d.int(0, x.dim() - 1), d.int(0, x.dim() - 1)})), {}

    @generates(aten.unsqueeze.default)
    def unsqueeze(d: Draw) -> Arguments:
        x = d.float(*d.shape())
        return (x, d.int(-x.dim() - 1, x.dim())), {}

    @generates(aten.flatten.using_ints)
    def flatten(d: Draw) -> Arguments:
        x = d.float(*d.shape(2, 4))
        return (x, d.int(0, 1), -1), {}

    @generates(aten.unflatten.int)
    def unflatten(d: Draw) -> Arguments:
        return (d.float(d.size(), 12, d.size()), 1, d.of([[3, 4], [2, -1], [2, 3, 2]])), {}

    @generates(aten.view.dtype, dtypes=WIDE)
    def view_dtype(d: Draw) -> Arguments:
        return (d.float(*d.shape(1, 3), 4), d.of([torch.float64, torch.int32, torch.float32])), {}

    @generates(aten.expand.default, aten.expand_copy.default, aten.broadcast_to.default)
    def expand(d: Draw) -> Arguments:
        full = d.shape(0, 4)
        x = d.float(*broadcast(d, full))
        lead = len(full) - x.dim()
        sizes = [-1 if i >= lead and x.shape[i - lead] == n and d.bool() else n for i, n in enumerate(full)]
        return (x, list(full) if d.bool() else sizes), {}

    @generates(aten.expand_as.default)
    def expand_as(d: Draw) -> Arguments:
        full = d.shape(0, 3)
        return (d.float(*broadcast(d, full)), d.float(*full)), {}

    @generates(aten.permute.default, aten.permute_copy.default)
    def permute(d: Draw) -> Arguments:
        x = d.float(*d.shape())
        order: list[int] = []
        for dim in range(x.dim()):
            order.insert(d.int(0, len(order)), dim)
        return (x, order), {}

    @generates(aten.transpose.int, aten.movedim.int)
    def transpose(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, d.dim(x.dim()), d.dim(x.dim())), {}

    @generates(aten.t.default, aten.numpy_T.default)
    def t(d: Draw) -> Arguments:
        return (d.float(*d.shape(0, 2)),), {}

    @generates(aten.repeat.default)
    def repeat(d: Draw) -> Arguments:
        x = d.float(*d.shape(0, 3))
        return (x, [d.int(1, 2) for _ in range(x.dim() + d.int(0, 1))]), {}

    @generates(aten.repeat_interleave.self_int)
    def repeat_interleave(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, d.int(1, 3), d.of([None, d.dim(x.dim()), d.dim(x.dim())])), {}


def enter_slices() -> None:
    """Enter the generators of the slicing family."""

    def sliced(d: Draw) -> tuple[tuple[int, ...], int, int, int, int]:
        """Draw a shape, a dim of it, and the start, end and step of a slice."""
        shape = d.shape(1)
        dim = d.dim(len(shape))
        size = shape[dim]
        start = d.int(0, size - 1)
        return shape, dim, *d.of([(0, 2**62, 1), (start, d.int(start + 1, size), d.int(1, 2))])

    @generates(aten.slice.Tensor, aten.slice_copy.Tensor)
    def slice_(d: Draw) -> Arguments:
        shape, *rest = sliced(d)
        return (d.float(*shape), *rest), {}

    @generates(aten.narrow.default, aten.narrow_copy.default)
    def narrow(d: Draw) -> Arguments:
        shape = d.shape(1)
        dim = d.dim(len(shape))
        start = d.int(0, shape[dim] - 1)
        return (d.float(*shape), dim, start, d.int(1, shape[dim] - start)), {}

    @generates(aten.slice_backward.default)
    def slice_backward(d: Draw) -> Arguments:
        shape, dim, start, end, step = sliced(d)
        grad = torch.ops.aten.slice.Tensor(d.float(*shape), dim, start, end, step)
        return (grad.contiguous(), list(shape), dim, start, end, step), {}

    @generates(aten.slice_scatter.default)
    def slice_scatter(d: Draw) -> Arguments:
        shape, *rest = sliced(d)
        source = torch.ops.aten.slice.Tensor(d.float(*shape), *rest).contiguous()
        return (d.float(*shape), source, *rest), {}

    @generates(aten.select.int, aten.select_copy.int)
    def select(d: Draw) -> Arguments:
        shape = d.shape(1)
        dim = d.dim(len(shape))
        return (d.float(*shape), dim, d.int(-shape[dim], shape[dim] - 1)), {}

    @generates(aten.select_backward.default)
    def select_backward(d: Draw) -> Arguments:
        shape = d.shape(1)
        dim = d.dim(len(shape))
        grad = d.float(*shape).select(dim, 0).contiguous()
        return (grad, list(shape), dim, d.int(0, shape[dim] - 1)), {}

    @generates(aten.select_scatter.default)
    def select_scatter(d: Draw) -> Arguments:
        shape = d.shape(1)
        dim = d.dim(len(shape))
        return (d.float(*shape), d.float(*shape).select(dim, 0).contiguous(), dim, d.int(0, shape[dim] - 1)), {}

    @generates(aten.split.Tensor, aten.split_copy.Tensor, aten.unsafe_split.Tensor, aten.chunk.default,
               aten.unsafe_chunk.default, aten.tensor_split.sections)  # fmt: skip
    def split(d: Draw) -> Arguments:
        shape = d.shape(1)
        dim = d.dim(len(shape))
        return (d.float(*shape), d.int(1, shape[dim]), dim), {}

    @generates(aten.split_with_sizes.default, aten.split_with_sizes_copy.default)
    def split_with_sizes(d: Draw) -> Arguments:
        shape = d.shape(1)
        dim = d.dim(len(shape))
        first = d.int(1, shape[dim])
        return (d.float(*shape), [first, shape[dim] - first], dim), {}

    @generates(aten.unbind.int)
    def unbind(d: Draw) -> Arguments:
        shape = d.shape(1)
        return (d.float(*shape), d.dim(len(shape))), {}

    @generates(aten.cat.default)
    def cat(d: Draw) -> Arguments:
        shape = list(d.shape(1))
        dim = d.dim(len(shape))
        tensors = []
        for _ in range(d.int(1, 3)):
            shape[dim] = d.size()
            tensors.append(d.float(*shape))
        return (tensors, dim), {}

    @generates(aten.stack.default)
    def stack(d: Draw) -> Arguments:
        shape = d.shape(0, 3)
        tensors = [d.float(*shape) for _ in range(d.int(1, 3))]
        return (tensors, d.int(-len(shape) - 1, len(shape))), {}

    @generates(aten.constant_pad_nd.default)
    def constant_pad_nd(d: Draw) -> Arguments:
        shape = d.shape(1)
        pad = [d.int(0, 1) for _ in range(2 * d.int(1, len(shape)))]
        return (d.float(*shape), pad, d.of([0, 1.5])), {}

    @generates(aten.unfold.default, aten.unfold_copy.default)
    def unfold(d: Draw) -> Arguments:
        shape = d.shape(1)
        dim = d.dim(len(shape))
        return (d.float(*shape), dim, d.int(1, shape[dim]), d.int(1, 2)), {}

    @generates(aten.unfold_backward.default, dtypes=WIDE)
    def unfold_backward(d: Draw) -> Arguments:
        shape = d.shape(1)
        dim = d.int(0, len(shape) - 1)
        size, step = d.int(1, shape[dim]), d.int(1, 2)
        grad = d.float(*shape).unfold(dim, size, step).contiguous()
        return (grad, list(shape), dim, size, step), {}

    @generates(aten.tril.default, aten.triu.default)
    def triangle(d: Draw) -> Arguments:
        return (d.float(*d.shape(2)), d.int(-2, 2)), {}
