"""What an op allocates and what it passes on: learnt by running it once on meta tensors of the same form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .storages import Kernels, StorageLog


@dataclass(frozen=True)
class Form:
    """How a tensor lies in memory, and in which storage: whatever stands for it; ``start`` counts bytes in it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage: Any
    start: int = 0

    def meta(self) -> torch.Tensor:
        """Return a tensor of this form without memory."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class Result:
    """One tensor that an op returns.

    Attributes:
        shape, stride, dtype: its form.
        source: which tensor argument's storage it shares, or -1.
        fresh: which of the op's new storages it lies in, or -1.
        nbytes: of its storage.
        start: where it begins, in bytes behind the beginning of ``source``.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    source: int
    fresh: int
    nbytes: int
    start: int = 0


@dataclass(frozen=True)
class OpMemory:
    """What one op does to memory.

    Attributes:
        results: one for every tensor among the flat results, None for anything else.
        workspace_bytes: alive at most inside the op, beyond its operands and new results.
        single: the op returns one tensor, not a tuple.
    """

    results: tuple[Result | None, ...]
    workspace_bytes: int
    single: bool


class OpMemories:
    """Answers for every op and operands' form what the op does to memory; each distinct question is run once.

    Args:
        kernels: ops written in Python -> what they run on the device.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._known: dict[Any, OpMemory] = {}

    def of(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> OpMemory:
        """Return what ``target`` does to memory.

        Args:
            args, kwargs: with a ``Form`` for every tensor.
            value: the results' meta tensors, used where the op does not run on meta tensors: new and contiguous.
        """
        key = (target, _frozen(args), _frozen(kwargs))
        if key not in self._known:
            self._known[key] = self._run(target, args, kwargs, value)
        return self._known[key]

    def _run(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> OpMemory:
        given: list[torch.Tensor] = []

        def plain(leaf: Any) -> Any:
            if isinstance(leaf, Form):
                given.append(leaf.meta())
                return given[-1]
            return torch.device("meta") if isinstance(leaf, torch.device) else leaf

        args, kwargs = pytree.tree_map(plain, (args, kwargs), is_leaf=lambda leaf: isinstance(leaf, Form))
        log = StorageLog(self._kernels)
        log.hold("inputs", given)
        before = log.account.live_bytes
        try:
            with torch.no_grad(), log:
                out = target(*args, **kwargs)
        except Exception:
            # Somebody's own op may fail on meta tensors in any way; what the graph says of its results is right then.
            out, log, before = value, StorageLog(self._kernels), 0
        results = tuple(_results(out, given))
        new = {result.fresh: result.nbytes for result in results if result is not None and result.fresh >= 0}
        workspace = max(0, log.account.peak_bytes - before - sum(new.values()))
        return OpMemory(results, workspace, isinstance(out, torch.Tensor))


def _results(out: Any, given: list[torch.Tensor]) -> Iterator[Result | None]:
    sources = {tensor.untyped_storage()._cdata: index for index, tensor in reversed(list(enumerate(given)))}
    fresh: dict[int, int] = {}
    for leaf in [out] if isinstance(out, torch.Tensor) else out if isinstance(out, (tuple, list)) else []:
        if not isinstance(leaf, torch.Tensor):
            yield None
            continue
        storage = leaf.untyped_storage()
        source = sources.get(storage._cdata, -1)
        number = -1 if source >= 0 else fresh.setdefault(storage._cdata, len(fresh))
        start = int(leaf.storage_offset()) * leaf.element_size()
        yield Result(tuple(leaf.shape), leaf.stride(), leaf.dtype, source, number, storage.nbytes(), start)


def _frozen(value: Any) -> Any:
    """Return arguments as something that can be looked up: forms without their storage, numbers with their type."""
    if isinstance(value, Form):
        return (value.shape, value.stride, value.dtype)
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(_frozen, value))
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in value.items())
    return (type(value).__name__, repr(value) if isinstance(value, float) else value)
