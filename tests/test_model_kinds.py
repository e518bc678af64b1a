"""What models do beside layers, one kind a function, by random legal plans: a sample that changes with the date."""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.verified import verified_function

TARGETS = torch.tensor([0, 1, 5, 2])
MASK = torch.tensor([[1, 0, 1, 1, 0, 1], [1, 1, 1, 0, 0, 1], [1, 0, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1]]).bool()


def in_place_on_views(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1:4].mul_(2)
    y.t()[0].add_(1)
    y[1:3].fill_(0.25)
    y.view(-1)[::5].sub_(x.detach().view(-1)[::5])
    return y * y


def gradient_hook(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1) * 3)
    return y.pow(2)


def losses(x: Tensor) -> Tensor:
    weight = torch.arange(1, 7, dtype=x.dtype)
    chances = x.softmax(1)
    return (
        F.cross_entropy(x, TARGETS, weight=weight, ignore_index=1, label_smoothing=0.1)
        + F.cross_entropy(x, chances.detach(), weight=weight)
        + F.kl_div(x.log_softmax(1), chances.flip(1), reduction="batchmean")
        + F.multi_margin_loss(x, TARGETS)
        + F.huber_loss(x, x.flip(1))
        + F.binary_cross_entropy_with_logits(x, chances.detach(), pos_weight=weight)
    )


def masked_means(x: Tensor) -> Tensor:
    mean = (x * MASK).sum(0) / MASK.sum(0).clamp(min=1)
    most = x.masked_fill(~MASK, float("-inf")).logsumexp(1)
    return mean.pow(2).sum() + most.sum() + torch.where(MASK, x, torch.nan).nansum(1).sum() + x.std(0).sum()


def routing(x: Tensor) -> Tensor:
    weights, experts = x[:, :4].softmax(-1).topk(2, -1)
    gates = torch.zeros_like(x[:, :4]).scatter(-1, experts, weights)
    order = experts.flatten().argsort(stable=True)
    sent = x[order // 2] * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, order // 2, sent) * gates.sum() + F.one_hot(experts, 6).sum(1) * x


def indexing(x: Tensor) -> Tensor:
    rows = torch.tensor([0, 2, 2, 4])
    wide = torch.zeros(5, 6, dtype=x.dtype).index_put((rows,), x, accumulate=True)
    return (
        wide.pow(2).sum() + x.index_put((rows % 4, rows), x.new_ones(())).cos().sum() + x.masked_scatter(MASK, x).sum()
    )


def stochastic_depth(x: Tensor) -> Tensor:
    keep = (torch.rand(x.shape[0], 1, dtype=x.dtype) < 0.7).to(x.dtype)
    noisy = x + F.dropout(x, 0.3, True) * keep / 0.7
    return F.alpha_dropout(noisy, 0.2, True).sum() + F.dropout1d(noisy.view(4, 3, 2), 0.5, True).pow(2).sum()


def repeated_letters(x: Tensor) -> Tensor:
    square = x.t() @ x
    return torch.einsum("ii->i", square).sum() + torch.einsum("aab->ab", square[:4, :4, None] * x[:, None, :1]).sum()


def spectra(x: Tensor) -> Tensor:
    filtered = torch.fft.irfft(torch.fft.rfft(x, dim=0) * torch.polar(x.new_ones(3, 6), x[:3]), n=4, dim=0)
    return torch.fft.fft2(x).real.pow(2).mean() + filtered.sum() + torch.fft.rfft(x, norm="ortho").abs().sum()


def recurrent(x: Tensor, lstm: Any, gru: Any) -> Tensor:
    out, (hidden, cell) = lstm(x.view(4, 2, 3))
    return out.sum() + hidden.pow(2).sum() + cell.sum() + gru(x.view(4, 2, 3))[0].pow(2).sum()


def transforms(x: Tensor) -> Tensor:
    weight = x[:, :4].detach()
    slopes = torch.vmap(torch.func.jacrev(lambda row: (x.t() @ x) @ row.sin()))(x)
    _, along = torch.func.jvp(lambda y: F.softmax(y @ x.t(), -1), (x,), (torch.ones_like(x),))
    ensemble = torch.vmap(lambda w, y: F.linear(y, w).tanh(), in_dims=(0, None))(weight.expand(3, 4, 4), x[:, :4])
    return slopes.sum() + along.pow(2).sum() + ensemble.pow(2).sum() + torch.func.grad(lambda y: y.norm())(x).sum()


KINDS: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[nn.Module, ...]]]] = {
    "in place on views": (in_place_on_views, tuple),
    "gradient hook": (gradient_hook, tuple),
    "losses": (losses, tuple),
    "masked means": (masked_means, tuple),
    "routing": (routing, tuple),
    "indexing": (indexing, tuple),
    "stochastic depth": (stochastic_depth, tuple),
    "repeated letters": (repeated_letters, tuple),
    "spectra": (spectra, tuple),
    "scans": (lambda x: x.cumsum(0) * x.cumprod(1) + x.logcumsumexp(1) + x.cummax(0)[0].flip(1).cumsum(1), tuple),
    "gradient inside": (lambda x: torch.autograd.grad((x.sin() * x).sum(), x, create_graph=True)[0].pow(2), tuple),
    "vmap": (lambda x: torch.vmap(lambda row: (row[:, None] * row[None, :]).sum())(x), tuple),
    "transforms": (transforms, tuple),
    "recurrent": (
        recurrent,
        lambda: (
            nn.LSTM(3, 2, batch_first=True, bidirectional=True, proj_size=1).double(),
            nn.GRU(3, 2, bidirectional=True).double(),
        ),
    ),
    "transposed convolution": (
        lambda x, conv: conv(x.view(1, 4, 2, 3)).pow(2),
        lambda: (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2).double(),),
    ),
    "parametrized weights": (
        lambda x, normed, spectral: spectral(normed(x).tanh()),
        lambda: (
            nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)).double(),
            nn.utils.parametrizations.spectral_norm(nn.Linear(8, 6)).double(),
        ),
    ),
    "norms, one of them in eval mode": (
        lambda x, batch, evaluated, instance: evaluated(batch(x)) + instance(x.view(4, 3, 2)).view(4, 6),
        lambda: (
            nn.BatchNorm1d(6).double(),
            nn.BatchNorm1d(6).double().eval(),
            nn.InstanceNorm1d(3, affine=True, track_running_stats=True).double(),
        ),
    ),
}
SAMPLE = random.Random(datetime.date.today().toordinal()).sample(sorted(KINDS), 5)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_random_plan_equals_one_device(name: str) -> None:
    """Outputs, gradients, buffers and a step of the optimizer, on (3) and (2, 2)."""
    function, modules = KINDS[name]
    verified_function(function, *modules())
