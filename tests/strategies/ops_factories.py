"""Arguments for factories."""

from __future__ import annotations

import torch

from tests.strategies.op_draws import WIDE, Arguments, Draw, generates

aten = torch.ops.aten


def enter_factories() -> None:
    """Enter the generators of the factories family."""

    @generates(aten.zeros.default, aten.ones.default, aten.empty.memory_format)
    def zeros(d: Draw) -> Arguments:
        return (list(d.shape()),), {"dtype": d.dtype}

    @generates(aten.full.default)
    def full(d: Draw) -> Arguments:
        return (list(d.shape()), 2.5), {"dtype": d.dtype}

    @generates(aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default)
    def new_zeros(d: Draw) -> Arguments:
        x = d.float(*d.shape())
        return (x, d.of([list(x.shape), list(d.shape())])), {}

    @generates(aten.new_full.default)
    def new_full(d: Draw) -> Arguments:
        x = d.float(*d.shape())
        return (x, d.of([list(x.shape), list(d.shape())]), 3), {}

    @generates(aten.new_empty_strided.default)
    def new_empty_strided(d: Draw) -> Arguments:
        return (d.float(3), [2, 3], [3, 1]), {}

    @generates(aten.scalar_tensor.default)
    def scalar_tensor(d: Draw) -> Arguments:
        return (d.of([0, 1.5]),), {"dtype": d.dtype}

    @generates(aten.arange.default)
    def arange(d: Draw) -> Arguments:
        return (d.of([d.size(), 3.5]),), d.of([{}, {"dtype": torch.float32}])

    @generates(aten.arange.start)
    def arange_start(d: Draw) -> Arguments:
        return (d.int(-3, 3), 3 + d.size()), {"dtype": d.of([torch.int64, torch.float64])}

    @generates(aten.arange.start_step)
    def arange_step(d: Draw) -> Arguments:
        return d.of([(d.int(-3, 3), 3 + d.size(), d.int(1, 3)), (9, -9, -2), (0, 1, 0.25)]), {}

    @generates(torch.ops.prims.iota.default)
    def iota(d: Draw) -> Arguments:
        options = {"dtype": torch.int64, "device": torch.device("cpu"), "requires_grad": False}
        return (d.size(),), {"start": d.int(-2, 2), "step": d.int(1, 3), **options}

    @generates(aten.eye.default)
    def eye(d: Draw) -> Arguments:
        return (d.size(),), {}

    @generates(aten.eye.m, aten.tril_indices.default, aten.triu_indices.default)
    def eye_m(d: Draw) -> Arguments:
        return (d.size(), d.size()), {}

    @generates(aten.linspace.default, aten.logspace.default)
    def linspace(d: Draw) -> Arguments:
        return (0.0, 1.0, d.size()), {}

    @generates(aten.hann_window.default, aten.hamming_window.default)
    def window(d: Draw) -> Arguments:
        return (d.size(),), {}

    @generates(aten.rand.default, aten.randn.default)
    def rand(d: Draw) -> Arguments:
        return (list(d.shape()),), {}

    @generates(aten.randint.default)
    def randint(d: Draw) -> Arguments:
        return (9, list(d.shape())), {}

    @generates(aten.randint.low)
    def randint_low(d: Draw) -> Arguments:
        return (2, 9, list(d.shape())), {}

    @generates(aten.randperm.default)
    def randperm(d: Draw) -> Arguments:
        return (d.size(),), {}

    @generates(aten.randint_like.default)
    def randint_like(d: Draw) -> Arguments:
        return (d.float(*d.shape()), 9), {}

    @generates(aten.randint_like.low_dtype)
    def randint_like_low(d: Draw) -> Arguments:
        return (d.float(*d.shape()), 2, 9), {}

    @generates(aten.uniform.default, aten.exponential.default)
    def uniform(d: Draw) -> Arguments:
        return (d.float(*d.shape()),), {}

    @generates(aten.rand_like.default, aten.randn_like.default, aten.normal_functional.default)
    def rand_like(d: Draw) -> Arguments:
        return (d.float(*d.shape()),), {}

    @generates(aten.bernoulli.default, aten.normal.Tensor_float)
    def bernoulli_of(d: Draw) -> Arguments:
        return (d.float(*d.shape()).sigmoid(),), {}

    @generates(aten.bernoulli.p)
    def bernoulli_p(d: Draw) -> Arguments:
        return (d.float(*d.shape()), 0.5), {}

    @generates(aten.native_dropout.default)
    def native_dropout(d: Draw) -> Arguments:
        return (d.float(*d.shape()), 0.5, True), {}

    @generates(aten.multinomial.default, dtypes=WIDE)
    def multinomial(d: Draw) -> Arguments:
        return (d.float(3, 5).abs(), 2), {}

    @generates(torch.ops.autopar.bernoulli.default)
    def bernoulli(d: Draw) -> Arguments:
        shape = list(d.shape())
        return (shape, 0.75, d.dtype, torch.device("cpu"), [0] * len(shape), list(shape)), {}
