"""Optimizers of a module that was parallelized since."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.errors import OptionError
from autopar.runtime.stale_optimizers import watch_originals


def test_stale_optimizer() -> None:
    """A step that would do nothing is refused; other optimizers, and an original that is trained, go on."""
    original, other = nn.Linear(2, 2), nn.Linear(2, 2)
    stale = torch.optim.SGD(original.parameters(), lr=0.1)
    watch_originals(original)
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    with pytest.raises(OptionError, match=r"parallel module's parameters\(\)"):
        stale.step()
    original(torch.ones(1, 2)).sum().backward()
    stale.step()
