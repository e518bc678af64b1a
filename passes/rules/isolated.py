"""Run a function in a process of its own: what crashes or never ends there harms nothing here."""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import time
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

LIMIT_S = 60.0


class Crashed(Exception):
    """The process died, or did not end in time."""


def isolated(function: Callable[[], T], limit_s: float = LIMIT_S) -> T:
    """Return what ``function`` returns in a forked process, which computes on the CPU in one thread.

    Its result must pickle. Where processes can't be forked the function runs in this one.

    Raises:
        Crashed: the process died of a signal, or did not end within ``limit_s`` seconds.
    """
    if not hasattr(os, "fork"):
        return function()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of forks beside threads, of which the child uses none
        child = os.fork()
    if child == 0:
        _run_child(function, writing)
    os.close(writing)
    try:
        answer, in_time = _read(reading, time.monotonic() + limit_s)
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)  # it has said all it had to say, or is too late
        os.waitpid(child, 0)
    if not in_time:
        raise Crashed(f"it did not end within {limit_s:g} s")
    if not answer:
        raise Crashed("its process died")
    return pickle.loads(answer)  # type: ignore[no-any-return]


def _run_child(function: Callable[[], T], writing: int) -> None:
    """Send what the function returns, in silence, and end without any clean-up of the parent's."""
    try:
        faulthandler.disable()
        torch.set_num_threads(1)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(pickle.dumps(function()))
    finally:
        os._exit(0)


def _read(reading: int, deadline: float) -> tuple[bytes, bool]:
    """Return all that comes before the other end closes, and whether it closed before the deadline."""
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return b"".join(parts), False
        part = os.read(reading, 1 << 16)
        if not part:
            return b"".join(parts), True
        parts.append(part)
