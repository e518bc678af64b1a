"""A pool of gloo processes that lives for the whole test session, because starting one costs seconds."""

from __future__ import annotations

import importlib
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

COLLECTIVE_TIMEOUT = timedelta(seconds=120)


class RankFailed(AssertionError):
    """A body raised on some rank, or did not come back in time."""


class Pool:
    """Runs the same function on every rank of a gloo world of ``size`` processes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[Any] = []
        self._pipes: list[Connection] = []

    def start(self) -> None:
        """Start the processes, unless they are there."""
        if self._workers:
            return
        context = get_context("spawn")
        store = tempfile.mktemp(prefix="autopar-pool-")
        for rank in range(self.size):
            here, there = context.Pipe()
            worker = context.Process(target=_serve, args=(rank, self.size, store, there), daemon=True)
            worker.start()
            there.close()
            self._workers.append(worker)
            self._pipes.append(here)

    def stop(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for worker in self._workers:
            worker.kill()
            worker.join()
        self._workers, self._pipes = [], []

    def run(self, body: Callable[..., Any], *args: Any, timeout: float = 240.0) -> list[Any]:
        """Return what ``body(*args)`` returns on every rank. ``body`` is a function of an importable module.

        Raises:
            RankFailed: a rank raised, died, or was silent for ``timeout`` seconds; the pool starts afresh next time.
        """
        self.start()
        for pipe in self._pipes:
            pipe.send((body.__module__, body.__name__, args))
        deadline = time.monotonic() + timeout
        results: list[Any] = [None] * self.size
        faults = []
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    faults.append(f"rank {rank}: no answer after {timeout} s")
                    deadline = min(deadline, time.monotonic() + 2.0)
                    continue
                good, value = pipe.recv()
            except EOFError:
                good, value = False, f"died with exit code {self._workers[rank].exitcode}"
            if good:
                results[rank] = value
            else:
                faults.append(f"rank {rank}: {value}")
                deadline = min(deadline, time.monotonic() + 5.0)
        if faults:
            self.stop()
            raise RankFailed("\n".join(faults))
        return results


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT
    )
    while True:
        try:
            module, name, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((True, getattr(importlib.import_module(module), name)(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
