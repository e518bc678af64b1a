"""Batch norms in parts, beside torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.passes.cost.op_memory import Form, OpMemories
from autopar.passes.cost.storages import CPU_KERNELS, StorageLog
from autopar.passes.ops import norms
from autopar.passes.ops.norm_kernels import statistics_of

OPS: Any = torch.ops.autopar
EPS = 1e-3
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
LIE: dict[str, Callable[[], Tensor]] = {
    "rows": lambda: torch.randn(4, 3, 5, 2),
    "channels last": lambda: torch.randn(4, 3, 5, 2).contiguous(memory_format=torch.channels_last),
    "channels last in space": lambda: torch.randn(2, 3, 2, 3, 2).contiguous(memory_format=torch.channels_last_3d),
    "no space": lambda: torch.randn(6, 3),
    "transposed": lambda: torch.randn(4, 5, 3).transpose(1, 2),
    "channels first": lambda: torch.randn(3, 4, 5).transpose(0, 1),
    "every other channel": lambda: torch.randn(4, 6, 5)[:, ::2],
    "repeated": lambda: torch.randn(1, 3, 5, 1).expand(4, 3, 5, 2),
}


def _statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return OPS.statistics(OPS.moments(x), x.numel() // x.shape[1], EPS, dtype)  # type: ignore[no-any-return]


def _expected(x: Tensor, weight: Tensor | None, bias: Tensor | None, grad: Tensor) -> list[Tensor | None]:
    """Return a batch norm and its gradients in float64 by torch."""
    leaves = [None if t is None else t.double().contiguous().clone().requires_grad_() for t in (x, weight, bias)]
    out = F.batch_norm(leaves[0], None, None, leaves[1], leaves[2], training=True, eps=EPS)  # type: ignore[arg-type]
    out.backward(grad.double().contiguous())
    return [out, *(None if leaf is None else leaf.grad for leaf in leaves)]


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.detach()).abs().max()) / max(1.0, float(expected.detach().abs().max()))


@pytest.mark.parametrize("form", ["kernels", "math"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lie", LIE)
def test_as_torch(lie: str, dtype: torch.dtype, form: str) -> None:
    """Forward and gradients are those of torch, however the input lies, with and without weights."""
    torch.manual_seed(0)
    x = LIE[lie]().to(dtype)
    weight, bias, grad = torch.randn(3).to(dtype), torch.randn(3).to(dtype), torch.randn(x.shape).to(dtype)
    run = norms.KERNELS if form == "kernels" else norms.MATH
    mean, variance, scale = _statistics(x)
    count = x.numel() // 3
    both = torch.stack((mean, variance + mean * mean)).double() * count
    assert _distance(run[OPS.moments.default](x), both) < TOLERANCE[torch.promote_types(dtype, torch.float32)]
    for said in (
        run[OPS.statistics.default](both, count, EPS, mean.dtype),
        *([] if form == "math" else [statistics_of(x, EPS)]),
    ):
        for one, other in zip(said, (mean, variance, scale), strict=True):
            assert _distance(one, other.double()) < TOLERANCE[mean.dtype] and one.dtype == other.dtype == mean.dtype
    for w, b in ((weight, bias), (None, None), (weight, None)):
        out, dx, dw, db = _expected(x, w, b, grad)
        found = run[OPS.normalise.default](x, w, b, mean, variance, EPS)
        sums = run[OPS.normalise_sums.default](grad, x, mean, scale)
        dot, total = sums.unbind()
        found_dx = run[OPS.normalise_backward.default](x, grad, w, mean, scale, sums, count)
        pairs = [
            (found, out),
            (found_dx, dx),
            *([(dot, dw)] if w is not None else []),
            *([(total, db)] if b is not None else []),
        ]
        for one, other in pairs:
            assert other is not None and _distance(one, other) < TOLERANCE[dtype]
        assert found.dtype == found_dx.dtype == dtype
        assert found.stride() == F.batch_norm(x, mean.to(dtype), variance.to(dtype)).stride() == found_dx.stride()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place_forms_write_the_same(dtype: torch.dtype) -> None:
    """What the other forms return lies in the memory of the input."""
    x, grad, weight = (torch.randn(*shape).to(dtype) for shape in ((4, 3, 5), (4, 3, 5), (3,)))
    mean, variance, _ = _statistics(x)
    sums = OPS.normalise_sums(grad, x, mean, variance)
    for name, args in (
        ("normalise", (weight, weight, mean, variance, EPS)),
        ("normalise_backward", (grad, weight, mean, variance + 0.5, sums, 20)),
    ):
        apart, written = getattr(OPS, name)(x, *args), x.clone()
        assert getattr(OPS, f"{name}_")(written, *args).data_ptr() == written.data_ptr()
        assert torch.equal(apart, written)


@pytest.mark.parametrize("far", [0.0, 5.0, 30.0, 1000.0])
def test_the_digits_of_a_variance_survive_the_sum_of_pieces(far: float) -> None:
    """A mean far from zero, in float32: moments of pieces add up to a variance of four digits."""
    torch.manual_seed(0)
    x = torch.randn(64, 3, 50) + far * torch.tensor([1.0, 0.0, -1.0])[:, None]
    expected = x.double().var((0, 2), unbiased=False).float()
    for pieces in ((1, 40, 23), (64,)):
        moments = sum(OPS.moments(piece) for piece in x.split(pieces))
        _, variance, _ = OPS.statistics(moments, 64 * 50, EPS, torch.float32)
        torch.testing.assert_close(variance, expected, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(statistics_of(x, EPS)[1], expected, rtol=2e-5, atol=0.0)
    assert float(_statistics(torch.full((4, 3), 7.3))[1].max()) < 1e-13


@pytest.mark.parametrize("shape", [(0, 3, 5), (4, 3, 0), (0, 3)])
def test_no_samples(shape: tuple[int, ...]) -> None:
    """A rank without samples adds nothing, and gives back what is empty; torch's kernels divide by zero."""
    x, values = torch.randn(shape), torch.ones(3)
    assert torch.equal(OPS.moments(x), torch.zeros(2, 3, dtype=torch.float64))
    assert OPS.normalise(x, values, None, values, values, EPS).shape == shape
    sums = OPS.normalise_sums(x, x, values, values)
    assert torch.equal(sums, torch.zeros(2, 3))
    assert OPS.normalise_backward(x, x, None, values, values, sums, 8).shape == shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lie", ["rows", "channels last", "transposed"])
def test_predicted_memory_is_what_the_kernels_allocate(lie: str, dtype: torch.dtype) -> None:
    """On meta tensors every op allocates what it does on the CPU."""
    x = LIE[lie]().to(dtype)
    grad, values, ones = (
        torch.randn(x.shape).to(dtype),
        torch.ones(3).to(torch.promote_types(dtype, torch.float32)),
        torch.ones(3).to(dtype),
    )
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (OPS.moments.default, (x,)),
        (OPS.statistics.default, (OPS.moments(x), x.numel() // 3, EPS, values.dtype)),
        (OPS.normalise.default, (x, ones, ones, values, values, EPS)),
        (OPS.normalise_.default, (x, ones, ones, values, values, EPS)),
        (OPS.normalise_sums.default, (grad, x, values, values)),
        (OPS.normalise_backward.default, (x, grad, ones, values, values, torch.stack((values, values)), 9)),
        (OPS.normalise_backward_.default, (x, grad, ones, values, values, torch.stack((values, values)), 9)),
    ]
    for op, args in calls:
        args = pytree.tree_map_only(Tensor, lambda t: t.clone(), args)
        log = StorageLog(CPU_KERNELS)
        log.hold("inputs", [arg for arg in args if isinstance(arg, Tensor)])
        before = log.account.live_bytes
        with torch.no_grad(), log:
            out = op(*args)
        forms = pytree.tree_map_only(Tensor, lambda t: Form(tuple(t.shape), t.stride(), t.dtype, None), args)
        found = OpMemories(CPU_KERNELS).of(op, forms, {}, None)
        new = {result.fresh: result.nbytes for result in found.results if result is not None and result.fresh >= 0}
        assert found.workspace_bytes + sum(new.values()) == log.account.peak_bytes - before, op
        assert [result.stride for result in found.results if result] == [t.stride() for t in pytree.tree_leaves(out)]
