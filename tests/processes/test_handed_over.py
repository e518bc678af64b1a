"""Gradients that are put into their parameters are those that autograd would have put there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.processes.handed_over import gradients
from tests.processes.pool import Pool

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("how", ["twice", "kept", "grad", "inputs", "hooks", "beside"])
def test_gradients(pool: Callable[[int], Pool], how: str) -> None:
    """Summed over backwards, also of one graph, asked for, asked of some, watched, and with terms outside."""
    for mine, whole in pool(2).run(gradients, how)[0]:  # the other rank's own model is another one
        torch.testing.assert_close(mine, whole, rtol=1e-5, atol=1e-6)
