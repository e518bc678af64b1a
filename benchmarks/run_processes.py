"""Run a function on some processes of one gloo group."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = timedelta(minutes=5)


def run_processes(ranks: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what ``body(rank, *args)`` returns in each of ``ranks`` forked processes.

    Raises:
        RuntimeError: it raised in one of them, or a process died; has the traceback.
    """
    context = get_context("fork")
    store = tempfile.mktemp(prefix="processes-")
    pipes, workers = [], []
    for rank in range(ranks):
        here, there = context.Pipe()
        worker = context.Process(target=_serve, args=(rank, ranks, store, there, body, args))
        worker.start()
        there.close()
        pipes.append(here)
        workers.append(worker)
    try:
        return [_take(rank, pipe) for rank, pipe in enumerate(pipes)]
    finally:
        for worker in workers:
            worker.join(timeout=10)
            if worker.is_alive():
                worker.terminate()


def _take(rank: int, pipe: Connection) -> Any:
    try:
        failed, value = pipe.recv()
    except EOFError:
        raise RuntimeError(f"process {rank} died") from None
    if failed:
        raise RuntimeError(f"process {rank} failed:\n{value}")
    return value


def _serve(
    rank: int, ranks: int, store: str, pipe: Connection, body: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=PATIENCE)
    try:
        pipe.send((False, body(rank, *args)))
    except Exception:
        pipe.send((True, traceback.format_exc()))
        raise SystemExit(1) from None
    dist.destroy_process_group()
