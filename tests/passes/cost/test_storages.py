"""The account of storages: each counted once, from the op that allocates it to its last user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autopar.passes.cost.storages import CPU_KERNELS, KINDS, StorageLog, kernels_of


def test_views_count_once_and_the_dead_do_not() -> None:
    """A view adds nothing, a result adds its bytes, and what nobody holds is gone at once."""
    x = torch.ones(10, 10)
    log = StorageLog({})
    log.hold("inputs", [x, x.view(100)])
    with log:
        y = (x.t() + 1).relu()
        z = y[0]
        del y
        assert log.account.live_bytes == 800
        del z
    assert log.account.live_bytes == 400
    assert log.account.peak_bytes == 1200


def test_the_highest_moment_by_purpose() -> None:
    """The first of the highest moments is named, and split by what its bytes are for; what was said first counts."""
    x = torch.ones(4)
    log = StorageLog({}, lambda op: f"at {op}")
    log.hold("inputs", [x])
    with log:
        y = x * 2
        log.hold("saved", [y])
        log.hold("outputs", [y])
        (x + y).sum()
    found = log.account.highest()
    assert (found.peak_bytes, found.at) == (52, "at aten.sum.default")
    assert list(found.parts) == list(KINDS)
    assert {k: v for k, v in found.parts.items() if v} == {"inputs": 16, "saved": 16, "temporaries": 20}
    assert str(found) == "52 bytes at at aten.sum.default: inputs 16, saved 16, temporaries 20"


def test_the_rest_and_later_moments() -> None:
    """What lives unclaimed can be named at once; a later start leaves out what was higher before."""
    x = torch.ones(100)
    log = StorageLog({})
    with log:
        y = x + 1
        log.hold_rest("saved")
        (y + 1).sum()
        start = len(log.account.events)
        z = y[:2] + 1
    assert log.account.highest().peak_bytes == 804
    later = log.account.highest(start)
    assert (later.peak_bytes, later.parts["saved"], later.parts["temporaries"]) == (408, 400, 8)
    assert z.numel() == 2


def _attention(q: torch.Tensor) -> Any:
    return torch.ops.autopar.attention(q, q, q, None, True, 1.0, 0)


def _dropout_mask(q: torch.Tensor) -> Any:
    return torch.ops.autopar.bernoulli([64, 8], 0.5, torch.float32, torch.device("cpu"), [0, 0], [2, 8])


@pytest.mark.parametrize("run", [_attention, _dropout_mask])
def test_python_kernels_are_looked_into(run: Callable[[torch.Tensor], Any]) -> None:
    """What a kernel written in Python needs inside counts while it runs; without its kernel only results do."""
    q = torch.ones(1, 2, 3, 4)
    peaks = []
    for kernels in (CPU_KERNELS, {}):
        log = StorageLog(kernels)
        with log:
            kept = run(q)
        peaks.append(log.account.peak_bytes)
        results = kept if isinstance(kept, tuple) else (kept,)
        assert log.account.live_bytes == sum(t.untyped_storage().nbytes() for t in results)
    assert peaks[0] > peaks[1]


def test_other_devices_have_their_own_kernels() -> None:
    """The attention of a GPU is one kernel; the mask is drawn whole everywhere."""
    assert set(kernels_of("h100")) < set(kernels_of("cpu"))
