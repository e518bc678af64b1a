"""``autopar::bernoulli``: the mask of eager dropout, bit for bit, and its pieces."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from autopar.passes import ops as _  # noqa: F401

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [[], [7], [3, 5, 4], [1, 1], [0, 3], [40, 1000]])
def test_equals_dropout(shape: list[int], dtype: torch.dtype) -> None:
    """The same seed gives the mask of ``F.dropout`` in every dtype, and leaves the generator in the same state."""
    torch.manual_seed(5)
    dropped = F.dropout(torch.ones(shape, dtype=dtype), 0.3, True)
    after = torch.rand(())
    torch.manual_seed(5)
    mask = torch.ops.autopar.bernoulli(shape, 0.7, dtype, CPU, [0] * len(shape), shape)
    assert mask.dtype == dtype
    assert torch.equal(mask, (dropped != 0).to(dtype))
    assert torch.equal(after, torch.rand(()))


def test_pieces() -> None:
    """A piece is cut from the whole mask, so that pieces drawn from one state fit together."""
    torch.manual_seed(1)
    whole = torch.ops.autopar.bernoulli([6, 5], 0.5, torch.float32, CPU, [0, 0], [6, 5])
    for start, size in ((0, 4), (4, 2), (6, 0)):
        torch.manual_seed(1)
        piece = torch.ops.autopar.bernoulli([6, 5], 0.5, torch.float32, CPU, [start, 1], [size, 3])
        assert torch.equal(piece, whole[start : start + size, 1:4]) and piece.is_contiguous()


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_edges(p: float) -> None:
    """Probabilities of nothing and everything."""
    assert torch.ops.autopar.bernoulli([4], p, torch.float32, CPU, [0], [4]).tolist() == [p] * 4


def test_fake_kernel() -> None:
    """A fake mask has the shape of its piece and draws nothing."""
    state = torch.get_rng_state()
    fake = torch.ops.autopar.bernoulli([6, 5], 0.5, torch.float32, torch.device("meta"), [2, 0], [3, 5])
    assert fake.shape == (3, 5) and fake.device.type == "meta"
    assert torch.equal(state, torch.get_rng_state())
