"""Arguments for the CTC loss."""

from __future__ import annotations

import torch

from tests.strategies.op_draws import WIDE, Arguments, Draw, generates

autopar = torch.ops.autopar


def enter_ctc() -> None:
    """Enter the generator."""

    @generates(autopar.ctc.default, dtypes=WIDE)
    def ctc(d: Draw) -> Arguments:
        samples, classes, longest = d.size(), d.int(2, 5), d.int(1, 3)
        times = d.int(2 * longest + 1, 9)
        log_probs = d.float(times, samples, classes).log_softmax(-1)
        targets = d.index(classes - 1, samples, longest) + 1
        given = torch.full((samples,), times) - d.index(2, samples)
        lengths = d.index(longest, samples) + 1
        if d.bool():
            targets = torch.cat([row[:length] for row, length in zip(targets, lengths.tolist())])
        return (log_probs, targets, given, lengths, 0, d.bool()), {}
