"""Batch norms whose statistics are the average over all batches."""

from __future__ import annotations

import torch
from torch import nn

from autopar.passes.capture import capture
from tests.verified import Around, verified_function


def test_cumulative_average() -> None:
    """Outputs, gradients and all three buffers equal eager's, in training and afterwards."""
    norm = nn.BatchNorm1d(6, momentum=None).double()
    norm(torch.randn(5, 6, dtype=torch.float64))
    verified_function(lambda x, inner: inner(x).tanh(), norm)
    verified_function(lambda x, inner: inner(x.view(2, 6, 2)).tanh(), norm)
    verified_function(lambda x, inner: inner(x).tanh(), norm.eval())


def test_the_module_is_left_as_it_was() -> None:
    """The forward that is used while tracing does not stay behind."""
    norm = nn.BatchNorm1d(6, momentum=None).double()
    capture(Around(lambda x, inner: inner(x), norm), (torch.randn(4, 6, dtype=torch.float64),))
    assert "forward" not in vars(norm) and norm.num_batches_tracked is not None and not norm.num_batches_tracked.any()
