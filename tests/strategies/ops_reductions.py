"""Arguments for reductions and norms."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.strategies.op_draws import WIDE, Arguments, Draw, generates

aten = torch.ops.aten


def enter_reductions() -> None:
    """Enter the generators of the reductions family."""

    def some_dims(d: Draw, rank: int) -> list[int]:
        return sorted({d.int(0, rank - 1) for _ in range(d.int(1, 2))}) if rank else []

    @generates(aten.sum.default, aten.max.default, aten.min.default, aten.prod.default, dtypes=WIDE)
    def of_all(d: Draw) -> Arguments:
        return (d.float(*d.shape()),), {}

    @generates(aten.count_nonzero.default, aten.any.default, aten.all.default)
    def of_masks(d: Draw) -> Arguments:
        return (d.mask(*d.shape()),), {}

    @generates(aten.nansum.default, aten.mean.default, dtypes=WIDE)
    def of_floats(d: Draw) -> Arguments:
        return (d.float(*d.shape()),), {}

    @generates(aten.sum.dim_IntList)
    def sum_dims(d: Draw) -> Arguments:
        x = d.of([d.float, lambda *s: d.index(9, *s), d.mask])(*d.shape())
        options = d.of([{}, {"dtype": torch.float64}])
        return (x, d.of([some_dims(d, x.dim()), [], None]), d.bool()), options

    @generates(aten.mean.dim, aten.logsumexp.default, aten.count_nonzero.dim_IntList, dtypes=WIDE)
    def mean_dims(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, some_dims(d, x.dim())), {}

    @generates(aten.amax.default, aten.amin.default)
    def extremes(d: Draw) -> Arguments:
        x = d.float(*d.shape())
        return (x, d.of([some_dims(d, x.dim()), []]), d.bool()), {}

    @generates(aten.any.dims, aten.all.dims)
    def any_dims(d: Draw) -> Arguments:
        x = d.mask(*d.shape(1))
        return (x, some_dims(d, x.dim()), d.bool()), {}

    @generates(aten.any.dim, aten.all.dim)
    def any_dim(d: Draw) -> Arguments:
        x = d.mask(*d.shape(1))
        return (x, d.dim(x.dim()), d.bool()), {}

    @generates(
        aten.max.dim,
        aten.min.dim,
        aten.median.dim,
        aten.nanmedian.dim,
        aten.mode.default,
        aten.prod.dim_int,
        dtypes=WIDE,
    )
    def one_dim(d: Draw) -> Arguments:
        x = d.float(*d.shape(1, 3))
        return (x, d.dim(x.dim()), d.bool()), {}

    @generates(aten.argmax.default, aten.argmin.default, dtypes=WIDE)
    def arg_extremes(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, d.of([None, d.dim(x.dim())])), {}

    @generates(aten.kthvalue.default, aten.topk.default, dtypes=WIDE)
    def kth(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, 1, d.dim(x.dim())), {}

    @generates(
        aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction, dtypes=WIDE
    )
    def spread(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, some_dims(d, x.dim())), {"correction": 0, "keepdim": d.bool()}

    @generates(aten.linalg_vector_norm.default, dtypes=WIDE)
    def vector_norm(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, 2, d.of([None, some_dims(d, x.dim())]), d.bool()), {}

    @generates(aten.norm.ScalarOpt_dim, dtypes=WIDE)
    def norm(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, 2, some_dims(d, x.dim()), d.bool()), {}

    @generates(
        aten.cumsum.default, aten.cumprod.default, aten.cummax.default, aten.cummin.default, aten.logcumsumexp.default,
        aten.sort.default, aten.argsort.default, dtypes=WIDE
    )  # fmt: skip
    def scans(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, d.dim(x.dim())), {}

    @generates(aten.sort.stable, dtypes=WIDE)
    def stable_sort(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x,), {"stable": True, "dim": d.dim(x.dim())}

    @generates(aten.softmax.int, aten.log_softmax.int, aten._safe_softmax.default)
    def softmax(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, d.dim(x.dim())), {}

    @generates(aten._softmax.default, aten._log_softmax.default)
    def inner_softmax(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, d.dim(x.dim()), False), {}

    @generates(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default, dtypes=WIDE)
    def softmax_backward(d: Draw) -> Arguments:
        shape = d.shape(1)
        dim = d.dim(len(shape))
        return (d.float(*shape), d.float(*shape).softmax(dim), dim, d.dtype), {}

    @generates(aten.flip.default)
    def flip(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, d.of([[], some_dims(d, x.dim())])), {}

    @generates(aten.roll.default)
    def roll(d: Draw) -> Arguments:
        x = d.float(*d.shape(1))
        return (x, [1], d.of([[], [d.dim(x.dim())]])), {}


def enter_norms() -> None:
    """Enter the generators of the norms family."""

    def normed(d: Draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return d.shape(0, 3), d.shape(1, 2)

    @generates(aten.native_layer_norm.default)
    def layer_norm(d: Draw) -> Arguments:
        lead, inner = normed(d)
        weight, bias = d.of([(None, None), (d.float(*inner), d.float(*inner))])
        return (d.float(*lead, *inner), list(inner), weight, bias, 1e-5), {}

    @generates(aten._fused_rms_norm.default)
    def rms_norm(d: Draw) -> Arguments:
        lead, inner = normed(d)
        return (d.float(*lead, *inner), list(inner), d.of([None, d.float(*inner)]), 1e-5), {}

    @generates(aten.native_layer_norm_backward.default, dtypes=WIDE)
    def layer_norm_backward(d: Draw) -> Arguments:
        lead, inner = normed(d)
        x = d.float(*lead, *inner)
        weight, bias = d.of([(None, None), (d.float(*inner), d.float(*inner))])
        _, mean, rstd = aten.native_layer_norm(x, list(inner), weight, bias, 1e-5)
        mask = [True, weight is not None, weight is not None]
        return (d.float(*lead, *inner), x, list(inner), mean, rstd, weight, bias, mask), {}

    @generates(aten.native_group_norm.default, dtypes=WIDE)
    def group_norm(d: Draw) -> Arguments:
        n, group, space = d.size(), d.size(), d.shape(1, 2)
        c = group * d.int(1, 3)
        x = d.float(n, c, *space)
        return (x, *d.of([(None, None), (d.float(c), d.float(c))]), n, c, x[0, 0].numel(), group, 1e-5), {}

    @generates(aten.native_group_norm_backward.default, dtypes=WIDE)
    def group_norm_backward(d: Draw) -> Arguments:
        n, group, space = d.size(), d.size(), d.shape(1, 2)
        c = group * d.int(1, 3)
        x, weight = d.float(n, c, *space), d.float(c)
        sizes = (n, c, x[0, 0].numel(), group)
        _, mean, rstd = aten.native_group_norm(x, weight, None, *sizes, 1e-5)
        return (d.float(*x.shape), x, mean, rstd, weight, *sizes, [True, True, True]), {}

    def batch(d: Draw) -> tuple[Tensor, int]:
        c = d.size()
        return d.float(d.int(2, 6), c, *d.shape(1, 2)), c

    def statistics(d: Draw, c: int) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(d.dtype, torch.float32)
        return d.float(c).to(dtype), d.float(c).abs().to(dtype) + 0.5

    @generates(aten._native_batch_norm_legit_functional.default, dtypes=WIDE)
    def batch_norm(d: Draw) -> Arguments:
        x, c = batch(d)
        return (x, d.float(c), d.float(c), d.float(c), d.float(c).abs(), d.bool(), 0.1, 1e-5), {}

    @generates(aten._native_batch_norm_legit_no_training.default, dtypes=WIDE)
    def batch_norm_fixed(d: Draw) -> Arguments:
        x, c = batch(d)
        return (x, d.float(c), d.float(c), d.float(c), d.float(c).abs(), 0.1, 1e-5), {}

    @generates(aten._native_batch_norm_legit.no_stats, dtypes=WIDE)
    def batch_norm_no_stats(d: Draw) -> Arguments:
        x, c = batch(d)
        return (x, d.float(c), d.float(c), True, 0.1, 1e-5), {}

    OWN = torch.ops.autopar

    @generates(OWN.moments.default)
    def moments(d: Draw) -> Arguments:
        return (batch(d)[0] + d.int(-20, 20),), {}

    @generates(OWN.statistics.default, dtypes=(torch.float64,))
    def statistics_of_moments(d: Draw) -> Arguments:
        x, _ = batch(d)
        return (OWN.moments(x), x.numel() // x.shape[1], 1e-5, d.of([torch.float32, torch.float64])), {}

    @generates(OWN.normalise.default)
    def normalise(d: Draw) -> Arguments:
        x, c = batch(d)
        given = d.of([(None, None), (d.float(c), d.float(c)), (d.float(c), None)])
        return (x, *given, *statistics(d, c), 1e-5), {}

    @generates(OWN.normalise_sums.default)
    def normalise_sums(d: Draw) -> Arguments:
        x, c = batch(d)
        return (d.float(*x.shape), x, *statistics(d, c)), {}

    @generates(OWN.normalise_backward.default)
    def normalise_backward(d: Draw) -> Arguments:
        x, c = batch(d)
        mean, scale = statistics(d, c)
        sums = torch.stack(statistics(d, c))
        return (x, d.float(*x.shape), d.of([None, d.float(c)]), mean, scale, sums, d.int(1, 9)), {}
