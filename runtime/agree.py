"""Agreements between ranks on a gloo group: errors, bytes, texts. Nobody waits for a rank that failed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from autopar import errors
from autopar.errors import AutoparError, InfeasibleError, InputError

T = TypeVar("T")

PATIENCE = timedelta(minutes=2)
"""How long a rank waits for the others where all come at about the same time."""

Failure = tuple[str, str, int | None]
"""Class name, message and least bytes of an error on its way to the other ranks."""


def raise_together(control: dist.ProcessGroup, what: str, error: Exception | None) -> None:
    """Raise on every rank when any rank has an error: its own on the rank that failed, a copy on the others.

    Args:
        control: the group that agrees.
        what: the work that was done, for the message.
        error: this rank's error, or None.

    Raises:
        AutoparError: of the class of the first error (a plain ``AutoparError`` when that is no error of autopar's).
    """
    flag = torch.tensor([0 if error is None else 1])
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=control)
    if int(flag) == 0:
        return
    failures = gather_objects(control, None if error is None else _describe(error))
    if error is not None:
        raise error
    rank, failure = next((i, failure) for i, failure in enumerate(failures) if failure is not None)
    raise _rebuild(rank, what, failure)


def gather_objects(control: dist.ProcessGroup, item: T) -> list[T]:
    """Return the item of every rank, in order. Items are pickled: small plain data only."""
    items: list[T] = [item] * dist.get_world_size(control)
    dist.all_gather_object(items, item, group=control)
    return items


def share_bytes(control: dist.ProcessGroup, data: bytes | None) -> bytes:
    """Return the bytes that the first rank of ``control`` hands in."""
    first = dist.get_rank(control) == 0
    source = dist.get_global_rank(control, 0)
    size = torch.tensor([len(data) if first and data is not None else 0])
    dist.broadcast(size, source, group=control)
    if first and data is not None:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    else:
        buffer = torch.empty(int(size), dtype=torch.uint8)
    if int(size):
        dist.broadcast(buffer, source, group=control)
    return buffer.numpy().tobytes()


def require_everyone(control: dist.ProcessGroup, what: str) -> None:
    """Return when every rank is here.

    Raises:
        InputError: some ranks did not come within ``PATIENCE``; names them.
    """
    try:
        dist.monitored_barrier(group=control, timeout=PATIENCE, wait_all_ranks=True)
    except RuntimeError as error:
        raise InputError(f"{what} is called by every rank, but some did not come: {error}") from error


def require_equal(control: dist.ProcessGroup, what: str, lines: Sequence[str], advice: str) -> None:
    """Raise on every rank when the ranks' ``lines`` differ.

    Raises:
        InputError: names the first line that differs, and what the ranks have there.
    """
    word = word_of(lines)
    words = torch.tensor([word, -word])
    dist.all_reduce(words, dist.ReduceOp.MAX, group=control)
    if int(words[0]) == -int(words[1]):
        return
    raise InputError(f"{difference(what, gather_objects(control, tuple(lines)))}; {advice}")


def difference(what: str, all_lines: Sequence[Sequence[str]]) -> str:
    """Return a sentence that names the first line in which ranks differ, with each rank's version."""
    longest = max(len(lines) for lines in all_lines)
    for index in range(longest):
        versions = [lines[index] if index < len(lines) else "nothing" for lines in all_lines]
        if len(set(versions)) > 1:
            shown = "; ".join(f"rank {rank} has {text}" for rank, text in enumerate(versions[:8]))
            return f"{what} differs between the ranks: {shown}"
    return f"{what} is the same on every rank"


def word_of(lines: Sequence[str]) -> int:
    """Return a digest of some lines of text, below 2 ** 56."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode())
        digest.update(b"\0")
    return int.from_bytes(digest.digest()[:7], "big")


def _describe(error: Exception) -> Failure:
    known = isinstance(error, AutoparError)
    name = type(error).__name__
    text = str(error) if known else f"{name}: {error}"
    return (name if known else "AutoparError", text, getattr(error, "least_bytes", None))


def _rebuild(rank: int, what: str, failure: Failure) -> AutoparError:
    name, text, least_bytes = failure
    message = f"{what} failed on rank {rank}: {text}"
    if name == "InfeasibleError":
        return InfeasibleError(message, least_bytes)
    kind = getattr(errors, name, AutoparError)
    return kind(message) if isinstance(kind, type) and issubclass(kind, AutoparError) else AutoparError(message)
