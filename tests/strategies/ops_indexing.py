"""Arguments for reads and writes at indices."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.strategies.op_draws import WIDE, Arguments, Draw, broadcast, generates

aten = torch.ops.aten


def enter_indexing() -> None:
    """Enter the generators of the indexing families."""

    @generates(aten.embedding.default)
    def embedding(d: Draw) -> Arguments:
        rows = d.size()
        return (d.float(rows, d.size()), d.index(rows, *d.shape(0, 3)), d.of([-1, 0])), {}

    @generates(aten.embedding_dense_backward.default, dtypes=WIDE)
    def embedding_dense_backward(d: Draw) -> Arguments:
        rows, shape = d.size(), d.shape(1, 3)
        return (d.float(*shape, d.size()), d.index(rows, *shape), rows, d.int(-1, rows - 1), d.int(0, 4) == 0), {}

    def along(d: Draw) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
        """Draw a shape, a dim, and the shape of an index along it."""
        shape = d.shape(1)
        dim = d.dim(len(shape))
        index = [size if d.int(0, 3) else d.int(1, size) for size in shape]
        index[dim] = d.size()
        return shape, dim, tuple(index)

    @generates(aten.gather.default)
    def gather(d: Draw) -> Arguments:
        shape, dim, index = along(d)
        values = d.of([d.float, d.mask, lambda *s: d.index(9, *s)])(*shape)
        return (values, dim, d.index(shape[dim], *index)), {}

    @generates(aten.index_select.default)
    def index_select(d: Draw) -> Arguments:
        shape, dim, _ = along(d)
        return (d.float(*shape), dim, d.index(shape[dim], d.size())), {}

    @generates(aten.scatter_add.default, dtypes=WIDE)
    def scatter_add(d: Draw) -> Arguments:
        shape, dim, index = along(d)
        source = tuple(n + (d.int(0, 3) == 0) for n in index)
        return (d.float(*shape), dim, d.index(shape[dim], *index), d.float(*source)), {}

    @generates(aten.scatter.value)
    def scatter_value(d: Draw) -> Arguments:
        shape, dim, index = along(d)
        return (d.float(*shape), dim, d.index(shape[dim], *index), 1), {}

    @generates(aten.scatter.src)
    def scatter_src(d: Draw) -> Arguments:
        shape = d.shape(1)
        dim = d.dim(len(shape))
        order = d.float(*shape).argsort(dim)
        return (d.float(*shape), dim, order, d.float(*shape)), {}

    @generates(aten.index_add.default, dtypes=WIDE)
    def index_add(d: Draw) -> Arguments:
        shape, dim, _ = along(d)
        count = d.size()
        source = list(shape)
        source[dim] = count
        return (d.float(*shape), dim, d.index(shape[dim], count), d.float(*source)), d.of([{}, {"alpha": 2}])

    @generates(aten.searchsorted.Tensor, dtypes=WIDE)
    def searchsorted(d: Draw) -> Arguments:
        return (d.float(d.size()).sort().values, d.float(*d.shape(1))), {}

    @generates(aten.bucketize.Tensor, dtypes=WIDE)
    def bucketize(d: Draw) -> Arguments:
        return (d.float(*d.shape(1)), d.float(d.size()).sort().values), {}

    def indices(d: Draw, shape: tuple[int, ...]) -> list[Tensor | None]:
        """Draw indices for some dims of a shape, which broadcast together; some count from the end."""
        together = d.shape(0, 2)
        out: list[Tensor | None] = []
        for size in shape[: d.int(1, len(shape))]:
            index = d.index(size, *broadcast(d, together))
            if together and not index.dim():
                index = index.reshape(1)  # fake tensors of torch 2.13 lose a dim for a 0-dim index beside longer ones
            out.append(d.of([None, index, index - size]))
        if all(index is None for index in out):
            out[-1] = d.index(shape[len(out) - 1], *together)
        return out

    @generates(aten.index.Tensor, aten._unsafe_index.Tensor)
    def index(d: Draw) -> Arguments:
        shape = d.shape(1)
        values = d.of([d.float, d.mask])(*shape)
        return (values, indices(d, shape)), {}

    @generates(aten.index_put.default, aten._unsafe_index_put.default, dtypes=WIDE)
    def index_put(d: Draw) -> Arguments:
        shape = d.shape(1)
        at = indices(d, shape)
        x = d.float(*shape)
        accumulate = d.int(0, 3) > 0
        values = d.float(*broadcast(d, tuple(aten.index.Tensor(x, at).shape)))
        if not accumulate:
            values = d.float()
        return (x, at, values, accumulate), {}
