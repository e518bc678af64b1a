"""Arguments for the ops of a micro-batch."""

from __future__ import annotations

import torch

from tests.strategies.op_draws import WIDE, Arguments, Draw, generates

autopar = torch.ops.autopar


def enter_micro_batches() -> None:
    """Enter the generators of the micro-batch family."""

    @generates(autopar.micro_batch.default, dtypes=WIDE)
    def micro_batch(d: Draw) -> Arguments:
        shape = [d.size(), *d.shape(0, 2)]
        dim, parts = d.int(0, len(shape) - 1), d.int(1, 3)
        shape[dim] *= parts
        return (d.float(*shape), torch.tensor(d.int(0, parts - 1)), dim, parts), {}

    @generates(autopar.join_micro_batches.default, dtypes=WIDE)
    def join_micro_batches(d: Draw) -> Arguments:
        shape = [d.size(), *d.shape(0, 2)]
        return (d.float(*shape), d.int(0, len(shape) - 1), d.int(1, 3)), {}

    @generates(autopar.over_micro_batches.default, dtypes=WIDE)
    def over_micro_batches(d: Draw) -> Arguments:
        return (d.float(*d.shape()), d.of(["sum", "max", "min", "product", "same"])), {}

    @generates(autopar.bernoulli_part.default, dtypes=WIDE)
    def bernoulli_part(d: Draw) -> Arguments:
        length = [d.size(), *d.shape(0, 2)]
        dim, parts = d.int(0, len(length) - 1), d.int(1, 3)
        whole = [size * parts if i == dim else size for i, size in enumerate(length)]
        index = torch.tensor(d.int(0, parts - 1))
        offset = [0] * len(length)
        return (index, whole, 0.75, d.dtype, torch.device("cpu"), offset, length, dim, length[dim]), {}
