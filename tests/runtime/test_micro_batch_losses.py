"""Losses whose micro-batches are not alike: counts, weights, totals of totals; exact as on one device, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import OptionError
from tests.rotate import todays

BATCH, LENGTH, WIDTH, CLASSES = 8, 3, 6, 5


def ignored(hidden: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """A mean over the labels that count: each micro-batch has another number of them, one has none."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100)


def summed(hidden: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """A sum, not a mean."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")


def weighted(hidden: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """A mean weighted by the class, smoothed."""
    weight = torch.arange(1.0, CLASSES + 1, dtype=logits.dtype)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), weight=weight, label_smoothing=0.1)


def balanced(hidden: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """An auxiliary loss of experts: the product of two means over the whole batch, whose gradient needs both."""
    gates = logits.softmax(-1)
    load = F.one_hot(gates.argmax(-1), CLASSES).to(gates.dtype).mean((0, 1))
    return ignored(hidden, logits, y) + 0.1 * CLASSES * (load * gates.mean((0, 1))).sum()


def root(hidden: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """Nonlinear in a mean over the batch."""
    return ignored(hidden, logits, y) + hidden.pow(2).mean().sqrt() * logits.exp().mean().log()


def z_loss(hidden: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """A penalty on the normaliser, which is a mean."""
    return ignored(hidden, logits, y) + 1e-2 * logits.logsumexp(-1).pow(2).mean()


def joined(hidden: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """Rows of all micro-batches side by side, as in a list of gate logits that are concatenated."""
    rows = torch.cat([logits.flatten(0, 1), 2 * logits.flatten(0, 1)], 0)
    return ignored(hidden, logits, y) + rows.softmax(0).pow(2).sum()


class Model(nn.Module):
    """Two layers with dropout, and a loss of the test's."""

    def __init__(self, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.head, self.loss = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), loss
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.drop(self.up(x).relu())
        return self.loss(hidden, self.head(hidden), y)


def build(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return the model in double precision and a batch whose rows count differently."""
    torch.manual_seed(3)
    model = Model(loss).double()
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (BATCH, LENGTH))
    y[:2], y[3, 0], y[5, 1:] = -100, -100, -100
    return model, (x, y)


LOSSES = [ignored, summed, weighted, balanced, root, z_loss, joined]
CASES = [(loss, count, cuts) for loss in LOSSES for count, cuts in ((8, ()), (2, ("head",)))]


@pytest.mark.parametrize(("loss", "count", "cuts"), todays(CASES, lambda case: case[0]))
def test_a_loss_is_that_of_the_whole_batch(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor], count: int, cuts: tuple[str, ...]
) -> None:
    """Exact to rounding, with one stage and with two."""
    model, args = build(loss)
    if cuts:
        waits = loss in (balanced, root, joined)
        mesh = autopar.Mesh((2, 2), ("pp", "data"))
        plan = autopar.plan(model, mesh, args, micro_batches=count, cuts=cuts, schedule="gpipe" if waits else "1f1b")
    else:
        plan = autopar.plan(model, 2, args, micro_batches=count)
    autopar.verify(model, plan, args)


def test_a_backward_that_waits_for_all_forwards_is_refused_by_schedules_that_do_not() -> None:
    """The message names the schedule that can."""
    model, args = build(balanced)
    with pytest.raises(OptionError, match="use schedule='gpipe'"):
        autopar.plan(model, autopar.Mesh((2,), ("pp",)), args, micro_batches=4, cuts=("head",), schedule="1f1b")


@pytest.mark.parametrize("term", [lambda t: t.std(0).mean(), lambda t: t.amax(0).sum()])
def test_totals_in_the_middle_are_refused(term: Callable[[Tensor], Tensor]) -> None:
    """A deviation needs the mean of all rows before it can look at one; a maximum knows its rows at the end alone."""
    model, args = build(lambda hidden, logits, y: ignored(hidden, logits, y) + term(logits))
    with pytest.raises(OptionError, match="every micro-batch would wait for all others in the middle"):
        autopar.plan(model, 2, args, micro_batches=2)


def test_a_batch_norm_is_refused_with_its_reason() -> None:
    """The message names the op, its module and what to do."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    with pytest.raises(OptionError, match=r"micro_batches=2 can't be exact: \w+ in 1 .* batch norm; use a norm within"):
        autopar.plan(model, 2, (torch.randn(BATCH, WIDTH),), micro_batches=2)
    autopar.plan(model.eval(), 2, (torch.randn(BATCH, WIDTH),), micro_batches=2)


@pytest.mark.parametrize("cuts", [(), ("3",)])
def test_a_batch_norm_of_each_micro_batch(cuts: tuple[str, ...]) -> None:
    """On request: as in gradient accumulation, running statistics included; the rest of the model stays exact."""
    torch.manual_seed(0)
    first, second = nn.BatchNorm2d(4), nn.BatchNorm2d(3, momentum=None)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), first, nn.ReLU(), nn.Conv2d(4, 3, 3), second, nn.Flatten()).double()
    x, y = torch.randn(BATCH, 2, 6, 6, dtype=torch.float64), torch.randint(0, 12, (BATCH,))
    y[:3] = -100
    mesh = autopar.Mesh((2, 2), ("pp", "data")) if cuts else autopar.Mesh((2,))
    plan = autopar.plan(
        model, mesh, (x, y), loss=F.cross_entropy, micro_batches=4, batch_norm="per_micro_batch", cuts=cuts
    )
    assert plan.pipeline is not None and plan.pipeline.norms == ("1", "4")
    autopar.verify(model, plan, (x, y), loss=F.cross_entropy)
    with pytest.raises(OptionError, match="batch_norm='loose' is unknown"):
        autopar.plan(model, mesh, (x, y), batch_norm="loose")


def test_a_number_that_does_not_divide_the_batch_is_refused() -> None:
    """The message names those that do."""
    model, args = build(summed)
    with pytest.raises(OptionError, match="micro_batches=3 does not divide the batch of 8 rows; use one of 1, 2, 4, 8"):
        autopar.plan(model, 2, args, micro_batches=3)
    with pytest.raises(OptionError, match="micro_batches=0 is no number of parts"):
        autopar.plan(model, 2, args, micro_batches=0)
