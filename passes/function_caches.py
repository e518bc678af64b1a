"""Functions of a model's code that remember what they returned: what a trace left in them is forgotten again.

A result that was computed while a model was traced stands for nothing outside of the trace; left in a cache, the next
ordinary call of the model would get it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any, TypeAlias

from torch import nn

Cached: TypeAlias = "functools._lru_cache_wrapper[Any]"
_KIND = functools._lru_cache_wrapper


def caches_of(model: nn.Module) -> list[Cached]:
    """Return the ``functools`` caches of the classes of a model's modules and of the files that define them."""
    classes, files = code_of(model)
    found: dict[int, Cached] = {}
    for cls in classes:
        for value in vars(cls).values():
            found.update((id(cache), cache) for cache in _below(value))
    for name in files:
        for value in list(vars(sys.modules[name]).values()) if name in sys.modules else ():
            if isinstance(value, _KIND) or getattr(value, "__module__", None) == name:
                found.update((id(cache), cache) for cache in _below(value))
    return list(found.values())


def code_of(model: nn.Module) -> tuple[list[type], list[str]]:
    """Return the classes of a model's modules, and the names of the Python modules that define them; none of torch."""
    classes = {cls: None for module in model.modules() for cls in type(module).__mro__ if not _of_torch(cls)}
    return list(classes), list({cls.__module__: None for cls in classes})


def _of_torch(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("torch", "builtins", "abc", "typing", "collections")


def _below(value: Any) -> Iterator[Cached]:
    """Yield the cache that a function is, or that it wraps."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    if isinstance(value, _KIND):
        yield value
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            try:
                inside = cell.cell_contents
            except ValueError:  # nothing is in it yet
                continue
            if isinstance(inside, _KIND):
                yield inside


class PreservedCaches:
    """Takes note of how often each cached function was really run; ``forget`` empties the caches of those run since."""

    def __init__(self, model: nn.Module) -> None:
        self._runs = [(cache, cache.cache_info().misses) for cache in caches_of(model)]

    def forget(self) -> None:
        """Empty the caches that were filled since."""
        for cache, runs in self._runs:
            if cache.cache_info().misses > runs:
                cache.cache_clear()
