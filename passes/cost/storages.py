"""Account of the storages that ops allocate: how many bytes are alive, how many at most, and what they are for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..ops import attention_kernels, bernoulli, norms
from ..torch_private import TorchDispatchMode

KINDS = ("parameters", "gradients", "optimizer", "buffers", "inputs", "outputs", "saved", "temporaries")
"""What bytes are for. What a step allocates and nobody claims is temporary."""

Kernels = Mapping[Any, Callable[..., Any]]

CPU_KERNELS: Kernels = {
    torch.ops.autopar.attention.default: attention_kernels.forward_cpu,
    torch.ops.autopar.attention_backward.default: attention_kernels.backward_cpu,
    torch.ops.autopar.bernoulli.default: bernoulli.kernel,
    **norms.KERNELS,
}
"""Ops that are written in Python -> their kernel on CPU, into which an account looks."""

KERNELS: Kernels = {torch.ops.autopar.bernoulli.default: bernoulli.kernel}
"""The same for any device."""


def kernels_of(device: str) -> Kernels:
    """Return the Python kernels that run on a device of a mesh (``cpu``, ``h100``, ...)."""
    return CPU_KERNELS if device == "cpu" else KERNELS


@dataclass(frozen=True)
class LiveBytes:
    """Bytes at the moment when most are alive.

    Attributes:
        peak_bytes: how many.
        at: the node or op that runs then.
        parts: what they are for, one entry for each of ``KINDS``.
        largest_gather_bytes: the largest result of a single gather, at any time.
    """

    peak_bytes: int
    at: str
    parts: dict[str, int]
    largest_gather_bytes: int = 0

    def __str__(self) -> str:
        """Return one line: the peak, where it is, and its parts."""
        parts = ", ".join(f"{kind} {count}" for kind, count in self.parts.items() if count)
        return f"{self.peak_bytes} bytes at {self.at}: {parts}"


@dataclass
class Account:
    """Storages by number: when each came and went, and what it is for.

    Attributes:
        live_bytes, peak_bytes: now, and at most.
        count: storages so far; the number of the last.
        kinds: number of a storage -> what it is for.
        events: ``(number, bytes, where)`` in order; negative bytes when it goes.
    """

    live_bytes: int = 0
    peak_bytes: int = 0
    count: int = 0
    kinds: dict[int, str] = field(default_factory=dict)
    events: list[tuple[int, int, str]] = field(default_factory=list)

    def add(self, number: int, nbytes: int, where: str) -> None:
        """Write down that a storage came, or, with negative bytes, that it went."""
        self.events.append((number, nbytes, where))
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def open(self, nbytes: int, where: str, kind: str | None = None) -> int:
        """Write down that a new storage came, and return its number."""
        self.count += 1
        self.add(self.count, nbytes, where)
        if kind is not None:
            self.kinds[self.count] = kind
        return self.count

    def now(self) -> dict[str, int]:
        """Return what is alive now, by what it is for."""
        parts = dict.fromkeys(KINDS, 0)
        for number, nbytes, _ in self.events:
            parts[self.kinds.get(number, "temporaries")] += nbytes
        return parts

    def highest(self, since: int = 0, largest_gather_bytes: int = 0) -> LiveBytes:
        """Return the moment of most bytes from the event ``since`` on, the first if there are several."""
        live, best, moment = 0, -1, 0
        for index, (_, nbytes, _) in enumerate(self.events):
            live += nbytes
            if live > best and index >= since - 1:
                best, moment = live, index
        parts = dict.fromkeys(KINDS, 0)
        for number, nbytes, _ in self.events[: moment + 1]:
            parts[self.kinds.get(number, "temporaries")] += nbytes
        where = self.events[moment][2] if self.events else ""
        return LiveBytes(max(best, 0), where, parts, largest_gather_bytes)


class StorageLog(TorchDispatchMode):
    """While active, keeps account of every storage that an op allocates, each counted once.

    Memory that a kernel uses inside and gives back is seen for the kernels of ``kernels`` alone. Ops on DTensors are
    seen as the ops on their local tensors.

    Args:
        kernels: ops written in Python -> what to run in place of them, so that the ops inside are seen.
        where: returns the name of what runs, for the account; the op's own name by default.
    """

    def __init__(self, kernels: Kernels, where: Callable[[Any], str] = str) -> None:
        super().__init__()
        self.account = Account()
        self._kernels, self._where = kernels, where
        self._numbers: dict[int, int] = {}

    def hold(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Count storages that exist already, or say what those are for that are counted; what was said first counts."""
        for tensor in tensors:
            self.account.kinds.setdefault(self._number(tensor, kind), kind)

    def hold_rest(self, kind: str) -> None:
        """Say what all storages are for that are alive and nothing was said of."""
        for number in self._numbers.values():
            self.account.kinds.setdefault(number, kind)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a DTensor: it calls ops on its local tensor, which come here again
        kernel = self._kernels.get(func)
        if kernel is None:
            out = func(*args, **(kwargs or {}))
        else:
            with self:
                out = kernel(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._number(leaf, self._where(func))
        return out

    def _number(self, tensor: torch.Tensor, where: str) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._numbers:
            nbytes = storage.nbytes()
            self._numbers[key] = self.account.open(nbytes, where)
            weakref.finalize(storage, self._free, key, nbytes).atexit = False
        return self._numbers[key]

    def _free(self, key: int, nbytes: int) -> None:
        self.account.add(self._numbers.pop(key), -nbytes, "")
