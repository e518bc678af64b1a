"""The CTC loss in all its spellings, and split over samples."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.test_trace_loss import compare, draw
from tests.verified import verified_function

TARGETS = torch.tensor([[1, 2, 2], [3, 1, 4], [2, 4, 1]])
INPUTS, LENGTHS = torch.tensor([8, 7, 3]), torch.tensor([3, 2, 3])


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("spelling", ["rows", "joined", "lists", "alone"])
def test_ctc(spelling: str, reduction: str) -> None:
    """Values and gradients are eager's; the third sample is too short for its target."""

    def run(x: Tensor, targets: Tensor) -> Tensor:
        lengths: tuple[object, object] = (INPUTS, LENGTHS)
        if spelling == "lists":
            lengths = (tuple(INPUTS.tolist()), LENGTHS.tolist())
        if spelling == "alone":
            x, targets, lengths = x[:, 0], targets[0], (INPUTS[0], LENGTHS[0])
        return F.ctc_loss(x.log_softmax(-1), targets, *lengths, reduction=reduction, zero_infinity=True)  # type: ignore[arg-type]

    targets = TARGETS
    if spelling == "joined":
        targets = torch.cat([row[:length] for row, length in zip(TARGETS, LENGTHS.tolist())])
    compare(run, draw(8, 3, 5), targets)


def test_split_over_samples() -> None:
    """Random plans compute the same."""

    def run(x: Tensor) -> Tensor:
        steps = torch.stack([x.roll(i, 1) for i in range(5)])  # [5, 4, 6]
        targets = torch.tensor([[1, 2], [3, 4], [5, 1], [2, 0]])
        return F.ctc_loss(steps.log_softmax(-1), targets, torch.tensor([5, 5, 4, 5]), torch.tensor([2, 2, 2, 1]))

    program = verified_function(run)
    (rule,) = [node.meta["rule"] for node in program.ops() if str(node.target) == "autopar.ctc.default"]
    assert [factor.size for factor in rule.factors] == [4]
