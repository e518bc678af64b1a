"""Numbers that ranks on one host tell each other through memory that they share.

A call of gloo for a few bytes wakes several threads on each rank, some hundred microseconds of a processor that is
computing; writing into memory and looking into it takes a few. Where ranks live on several hosts there is no board.
"""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from weakref import WeakKeyDictionary

import torch.distributed as dist

from autopar.errors import InputError
from autopar.runtime.agree import gather_objects

SHARED_MEMORY = Path("/dev/shm")
"""A file system in the memory of this host alone."""

WORDS = 8
"""Numbers of 64 bits in a post, at most."""

TURNS = 8
"""Posts that a rank may be ahead of the slowest reader."""

YIELDS = 100
SHORT_S, LONG_S = 5e-5, 1e-3
LOOK_S = 1.0
"""How a reader waits: it lets others run for so many looks, sleeps for longer and longer, and sees who still lives."""

_SLOT = WORDS + 2
_MASK = 2**63 - 1


class Board:
    """What the ranks of a group have posted. Every rank posts and reads the same turns in the same order.

    Args:
        memory: shared by the ranks, zeros at first.
        rank: this rank's number in the group.
        processes: of all ranks: ``(process number, when it started)``.
        patience: how long a reader waits for a rank that lives.
    """

    def __init__(self, memory: mmap.mmap, rank: int, processes: Sequence[tuple[int, str]], patience: timedelta) -> None:
        size = self.size(len(processes))
        self._words = memoryview(memory)[:size].cast("q")
        self._rank, self._processes, self._patience = rank, processes, patience
        self._everyone = range(len(processes))
        self._posted = self._read = self._all_read = 0

    @staticmethod
    def size(num_ranks: int) -> int:
        """Return the bytes of a board: for each rank the turns that it has read, and its posts."""
        return 8 * num_ranks * (1 + TURNS * _SLOT)

    def post(self, words: Sequence[int]) -> int:
        """Tell the others up to ``WORDS`` signed numbers of 64 bits; return the turn, to read it by."""
        if self._posted - self._all_read >= TURNS:
            self._await(self._slow_readers)
            self._all_read = min(self._words[self._mark(rank)] for rank in self._everyone)
        turn = self._posted = self._posted + 1
        at = self._slot(self._rank, turn)
        padded = [*words, *[0] * (WORDS - len(words))]
        for offset, word in enumerate(padded):
            self._words[at + 1 + offset] = word
        self._words[at + 1 + WORDS] = _check(turn, padded)
        self._words[at] = turn
        return turn

    def read(self, turn: int, ranks: Sequence[int] | None = None) -> list[list[int]]:
        """Return what each rank, or each of some, posted in a turn; wait for those that have not.

        Raises:
            InputError: a rank is gone, or does not come.
        """
        ranks = self._everyone if ranks is None else ranks
        out: list[list[int]] = [[]] * len(ranks)

        def missing() -> list[int]:
            for place, rank in enumerate(ranks):
                if not out[place]:
                    out[place] = self._look(rank, turn)
            return [rank for rank, found in zip(ranks, out) if not found]

        self._await(missing)
        self._read = max(self._read, turn)
        self._words[self._mark(self._rank)] = self._read
        return out

    def _look(self, rank: int, turn: int) -> list[int]:
        """Return a post, nothing where it is not there yet; half a post does not pass the check."""
        at = self._slot(rank, turn)
        if self._words[at] != turn:
            return []
        words = self._words[at + 1 : at + 1 + WORDS].tolist()
        return words if self._words[at + 1 + WORDS] == _check(turn, words) else []

    def _slot(self, rank: int, turn: int) -> int:
        return self._mark(rank) + 1 + turn % TURNS * _SLOT

    def _mark(self, rank: int) -> int:
        return rank * (1 + TURNS * _SLOT)

    def _slow_readers(self) -> list[int]:
        return [rank for rank in self._everyone if self._posted - self._words[self._mark(rank)] >= TURNS]

    def _await(self, missing: Callable[[], list[int]]) -> None:
        """Return when no rank is missing."""
        for _ in range(YIELDS):
            if not missing():
                return
            os.sched_yield()
        begin = looked = time.monotonic()
        pause = SHORT_S
        while missing():
            time.sleep(pause)
            pause = min(LONG_S, pause * 1.1)
            now = time.monotonic()
            if now - looked > LOOK_S:
                looked = now
                self._require_alive(missing, now - begin)

    def _require_alive(self, missing: Callable[[], list[int]], waited_s: float) -> None:
        """A rank that ended may have posted before: one that ended first and is missing then will never come."""
        ended = [rank for rank in missing() if _started(self._processes[rank][0]) != self._processes[rank][1]]
        ranks = missing()
        gone = [rank for rank in ended if rank in ranks]
        if gone:
            raise InputError(f"rank {gone[0]} of {len(self._processes)} ended while this one waits for its call")
        if ranks and waited_s > self._patience.total_seconds():
            raise InputError(
                f"rank {ranks[0]} of {len(self._processes)} did not come within {self._patience}; every rank must make "
                "the same calls"
            )


_BOARDS: WeakKeyDictionary[dist.ProcessGroup, Board | None] = WeakKeyDictionary()


def board_of(group: dist.ProcessGroup, patience: timedelta) -> Board | None:
    """Return the board of a gloo group, the same at each call; None where its ranks share no memory. Collective once.

    Args:
        group: whose ranks all call this.
        patience: as ``Board`` takes it.
    """
    if group not in _BOARDS:
        _BOARDS[group] = _make(group, patience)
    return _BOARDS[group]


def _make(group: dist.ProcessGroup, patience: timedelta) -> Board | None:
    num_ranks = dist.get_world_size(group)
    if num_ranks == 1:
        return None
    first = dist.get_rank(group) == 0
    path, token = gather_objects(group, _create(Board.size(num_ranks)) if first else (None, b""))[0]
    memory = None if path is None else _open(Path(path), token)
    me = (os.getpid(), _started(os.getpid()))
    facts = gather_objects(group, (memory is not None, me))
    shared = all(there and since and _started(pid) == since for there, (pid, since) in facts)
    agreed = all(gather_objects(group, shared))
    if first and path is not None:
        Path(path).unlink()
    if memory is None or not agreed:
        return None
    return Board(memory, dist.get_rank(group), [process for _, process in facts], patience)


def _create(size: int) -> tuple[str | None, bytes]:
    """Return a new file of zeros with a token at its end, and the token; no file where there is no room for one."""
    token = secrets.token_bytes(16)
    try:
        handle, path = tempfile.mkstemp(prefix="autopar-", dir=SHARED_MEMORY)
        with os.fdopen(handle, "wb") as file:
            file.write(bytes(size) + token)
    except OSError:
        return None, token
    return path, token


def _open(path: Path, token: bytes) -> mmap.mmap | None:
    """Return the memory behind a file, if it is the file that is meant: other hosts have other files of that name."""
    try:
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
    except OSError:
        return None
    return memory if memory[-len(token) :] == token else None


def _started(process: int) -> str:
    """Return when a process of this host started, in ticks; empty where it runs no more."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


def _check(turn: int, words: Sequence[int]) -> int:
    return (turn + sum(word * (2 * place + 3) for place, word in enumerate(words))) & _MASK
