"""Several collectives over one flat buffer bring what they bring one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.processes.flat_buffers import move
from tests.processes.pool import Pool

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_one_buffer(pool: Callable[[int], Pool], kind: str) -> None:
    """One call and one wait, whatever the shapes; every rank has the numbers of the single collectives."""
    for apart, together, calls in pool(2).run(move, kind, torch.float32):
        assert len(calls) == 2
        for one, other in zip(apart, together, strict=True):
            assert one.shape == other.shape
            assert torch.equal(one, other)
