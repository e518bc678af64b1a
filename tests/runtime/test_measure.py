"""Time taken of single calls: CPU time where cores are shared, never more calls than patience allows."""

from __future__ import annotations

import time

import pytest
import torch

from autopar.runtime import measure_ops, measure_rates
from autopar.runtime.measure import Meter


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    """Return a meter for one thread on the CPU."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    return Meter(torch.device("cpu"))


def test_waiting_is_no_work(meter: Meter) -> None:
    """On one thread CPU time counts: a call that waits for 20 ms has used far less."""
    assert meter.by_cpu_time
    assert meter.seconds(lambda: time.sleep(0.02), patience_s=0.05) < 0.01


def test_wall_time_counts_with_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more threads than one, CPU time would add them up, so the least wall time counts."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert 0.02 <= Meter(torch.device("cpu")).seconds(lambda: time.sleep(0.02)) < 0.2


def test_patience_ends_a_measurement(meter: Meter) -> None:
    """A slow call is made twice at most: once to warm up, once to measure."""
    calls = []

    def work() -> None:
        calls.append(0)
        time.sleep(0.01)
        sum(range(2_000_000))

    assert meter.seconds(work, patience_s=0.0) > 0
    assert len(calls) == 2


def test_one_rank_shares_nothing(meter: Meter) -> None:
    """Without other ranks nothing slows down, and means are the numbers themselves."""
    meter.observe()
    assert meter.slowdown == 1.0
    assert meter.mean(3.0) == 3.0 and meter.any(True) and not meter.any(False)


def test_the_kinds_of_op_are_measured(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are positive, a stream's sizes ascend, and a product's rate is not exceeded a hundredfold."""
    monkeypatch.setattr(measure_ops, "STREAM_BYTES", (2**12, 2**16))
    curve = measure_ops.stream_curve(meter, 1e-6)
    assert [row[0] for row in curve] == [2**13, 2**17] and all(row[1] > 1e6 for row in curve)
    assert all(1e6 < rate < 1e13 for rate in measure_ops.measured_shares(meter))
    assert 0 < measure_ops.draw_seconds(meter) < 1e-6


def test_ops_bound_by_memory_are_measured(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op runs on few rows and on many; the bytes of what it reads and makes are counted."""
    monkeypatch.setattr(measure_rates, "PATIENCE_S", 0.0)
    found = measure_rates.memory_rates(meter)
    assert set(found) == {str(op) for op in measure_rates.OPS}
    assert all(call_s > 0 and num_bytes > 1e4 and seconds > 0 for call_s, num_bytes, seconds in found.values())
    rows, channels = measure_rates.MANY_ROWS, measure_rates.CHANNELS
    assert found["aten.relu"][1] == 2 * 4 * rows * channels
    assert found["aten.sum"][1] == 4 * (rows + 1) * channels


@pytest.mark.parametrize("op", [torch.ops.aten.gelu, torch.ops.aten.max_pool2d_with_indices])
def test_an_op_slower_than_its_bytes_has_a_smaller_rate(meter: Meter, op: object) -> None:
    rates = []
    for each in (op, torch.ops.aten.relu):
        (seconds, num_bytes) = measure_rates._seconds(meter, each, measure_rates.OPS[each](measure_rates.MANY_ROWS))
        rates.append(num_bytes / seconds)
    assert rates[0] < rates[1]
