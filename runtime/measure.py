"""Take the time of single ops and collectives on a machine that several ranks, and others, may share.

On a CPU with one thread a rank, what counts for an op is the CPU time that it used: work of others on the machine does
not change it. How much longer the wall clock runs while all ranks compute, because they share the cores, is observed
apart (``slowdown``) and multiplied in at the end. Elsewhere the least of several wall times counts.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

REPEATS = 5
ENOUGH_S = 0.01
"""CPU seconds of calls that a measurement is taken over."""

OBSERVE_S = 0.25
COLLECTIVE_S, MOST_REPEATS = 0.1, 31
"""A collective is repeated until its calls took so many seconds, at most so often."""

APART_S = 0.01
MEETINGS = 31
"""What ranks compute before they meet, and how often, where it is seen how far they have come apart."""

LEAST_CONTENTION = 0.05
"""What no collective is better than: it reads and writes the memory that compute uses."""

CONTENTION_ROUNDS = 101

_ops = torch.ops._c10d_functional
CHUNK = 160
"""Side of the product that every rank computes between two collectives, so that they meet as those of a program do."""


class Meter:
    """Measures on one device, together with the other ranks.

    Args:
        device: where tensors lie.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.by_cpu_time = device.type == "cpu" and torch.get_num_threads() == 1
        self._observed: list[float] = []
        self._chunk = torch.ones(CHUNK, CHUNK, device=device)

    def seconds(self, work: Callable[[], Any], patience_s: float = math.inf) -> float:
        """Return the seconds of a call without those that sharing the cores adds; fewer calls after ``patience_s``."""
        if not self.by_cpu_time:
            return self._least_wall(work, patience_s)
        begin = time.perf_counter()
        work()
        least = math.inf
        for _ in range(REPEATS):
            start, calls = time.process_time(), 0
            while not calls or (used := time.process_time() - start) < ENOUGH_S:
                work()
                calls += 1
                used = time.process_time() - start
            least = min(least, used / calls)
            if time.perf_counter() - begin > patience_s:
                break
        return max(least, 1e-9)

    def _least_wall(self, work: Callable[[], Any], patience_s: float) -> float:
        least = math.inf
        begin = time.perf_counter()
        for turn in range(REPEATS + 1):
            start = time.perf_counter()
            work()
            self._wait()
            late = time.perf_counter() - begin > patience_s
            if turn or late:
                least = min(least, time.perf_counter() - start)
            if late:
                break
        return least

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def observe(self) -> None:
        """Let all ranks compute at once and note how much longer the wall clock runs than the CPU's. Collective."""
        if not self.by_cpu_time or self.num_ranks == 1:
            return
        dist.barrier()
        wall, used = time.perf_counter(), time.process_time()
        while time.perf_counter() - wall < OBSERVE_S:
            self.compute()
        ratio = (time.perf_counter() - wall) / max(1e-6, time.process_time() - used)
        self._observed.append(self.mean(ratio))

    @property
    def slowdown(self) -> float:
        """Wall seconds for a CPU second while all ranks compute, the median of what was observed; 1 for one rank."""
        return max(1.0, statistics.median(self._observed)) if self._observed else 1.0

    def compute(self) -> None:
        """Compute for some hundred microseconds."""
        self._chunk @ self._chunk

    def collective_seconds(self, work: Callable[[], Any]) -> float:
        """Return the wall seconds of a collective call as programs see it: ranks compute before, and meet unevenly.

        The median over calls, so that what else the machine did does not count, and the mean over ranks. Collective.
        """
        work()
        times: list[float] = []
        while len(times) < REPEATS or (sum(times) < COLLECTIVE_S and len(times) < MOST_REPEATS):
            self.compute()
            self._wait()
            start = time.perf_counter()
            work()
            self._wait()
            times.append(self.mean(time.perf_counter() - start))
        return statistics.median(times)

    def meet_seconds(self, work: Callable[[], Any]) -> float:
        """Return by how much a collective takes longer where ranks come from ``APART_S`` of compute. Collective.

        The median over calls and the mean over ranks, of which the later one waits for nobody.

        Args:
            work: the collective.
        """
        chunks = max(1, round(APART_S / self.mean(self.seconds(self.compute))))
        longer = []
        for _ in range(MEETINGS):
            times = []
            for number in (1, chunks):
                dist.barrier()
                for _ in range(number):
                    self.compute()
                self._wait()
                start = time.perf_counter()
                work()
                self._wait()
                times.append(time.perf_counter() - start)
            longer.append(self.mean(times[1] - times[0]))
        return max(0.0, statistics.median(longer))

    def contention(self, start: Callable[[], torch.Tensor]) -> float:
        """Return the part of its own time by which a collective slows the compute that it hides behind. Collective.

        Args:
            start: starts one and returns what is to be waited for.
        """

        def compute() -> torch.Tensor:
            for _ in range(chunks):
                self.compute()
            return self._chunk

        chunks = 1
        alone = self._together(lambda: _ops.wait_tensor(start()))
        chunks = max(1, round(2 * alone / self._together(compute)))
        shares = []
        for _ in range(CONTENTION_ROUNDS):  # side by side, so that what else the machine does meets all three
            alone = self._once(lambda: _ops.wait_tensor(start()))
            computed = self._once(compute)
            shares.append((self._once(lambda: _behind(start(), compute)) - computed) / alone)
        return min(1.0, max(LEAST_CONTENTION, self.mean(statistics.median(shares))))

    def _together(self, work: Callable[[], torch.Tensor]) -> float:
        """Return the wall seconds of what all ranks do at once: the median of several times, the mean over ranks."""
        return self.mean(statistics.median(self._once(work) for _ in range(2 * REPEATS + 1)))

    def _once(self, work: Callable[[], torch.Tensor]) -> float:
        dist.barrier()
        begin = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - begin

    def mean(self, value: float) -> float:
        """Return the mean of a number over the ranks. Collective."""
        if self.num_ranks == 1:
            return value
        total = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total) / self.num_ranks

    def any(self, value: bool) -> bool:
        """Tell whether it is so on any rank. Collective."""
        return self.mean(float(value)) > 0


def _behind(started: torch.Tensor, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    compute()
    return _ops.wait_tensor(started)  # type: ignore[no-any-return]
