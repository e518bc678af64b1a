"""``autopar::ctc``: the CTC loss of every sample, and its slope along the log probabilities.

The kernel of torch leaves a table whose shape depends on the longest target. The slope has a known one, and the
gradient is the slope times the gradient of the sample's loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .library import LIBRARY

LIBRARY.define(
    "ctc(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, bool zero_infinity)"
    " -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _ctc(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    aten = torch.ops.aten
    given = (log_probs, targets, input_lengths, target_lengths)
    losses, table = aten._ctc_loss.Tensor(*given, blank, zero_infinity)
    slope = aten._ctc_loss_backward.Tensor(torch.ones_like(losses), *given, losses, table, blank, zero_infinity)
    if zero_infinity:
        losses = losses.masked_fill(losses == float("inf"), 0.0)
    return losses, slope.contiguous()


def _ctc_meta(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    return log_probs.new_empty(log_probs.shape[1]), log_probs.new_empty(log_probs.shape)


LIBRARY.impl("ctc", _ctc, "CPU")
LIBRARY.impl("ctc", _ctc, "CUDA")
LIBRARY.impl("ctc", _ctc_meta, "Meta")
