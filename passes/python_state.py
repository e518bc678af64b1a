"""What a model keeps in Python from one call to the next: attributes, globals of its files, random generators.

A program repeats the call that was traced. If the next call would compute something else, that is no program of the
model. Most changes do not matter (a count of calls that nobody reads, a table that is made once), so a change alone is
no fault: it makes ``check_repeats`` look.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .function_caches import code_of

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_CONTAINERS = (list, tuple, set, frozenset, dict, OrderedDict, defaultdict, deque)
_WHOLE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, nn.Module)
_DICTS = ("_parameters", "_buffers", "_modules")
_DEPTH, _MOST_ITEMS = 3, 1000


class PythonState:
    """A picture of all that on entry; ``changed`` names what is different now."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._held: list[Any] = []  # keeps what is known by its identity alive
        self._before = self._picture()
        self._generators = generator_states()

    def changed(self) -> list[str]:
        """Return the names of attributes and globals that are not what they were."""
        now = self._picture()
        return [name for name in now if now[name] != self._before.get(name)]

    def drawn(self) -> list[str]:
        """Return the names of the random generators of Python and numpy that were drawn from."""
        now = generator_states()
        return [name for name in now if now[name] != self._generators.get(name, now[name])]

    def _picture(self) -> dict[str, Any]:
        seen: dict[int, Any] = {}
        return {name: self._of(value, _DEPTH, seen) for name, value in _named_values(self._model)}

    def _of(self, value: Any, depth: int, seen: dict[int, Any]) -> Any:
        if isinstance(value, _PLAIN):
            return repr(value)
        self._held.append(value)
        if isinstance(value, (Tensor, *_WHOLE)) or depth == 0 or id(value) in seen:
            return id(value)
        seen[id(value)] = None
        if type(value) in _CONTAINERS:
            return type(value), len(value), tuple(self._items(value, depth, seen))
        if hasattr(value, "bit_generator"):
            return repr(value.bit_generator.state)
        if isinstance(value, random.Random):
            return value.getstate()
        inside = getattr(value, "__dict__", None)
        return (id(value), tuple(self._items(inside, depth, seen))) if isinstance(inside, dict) else id(value)

    def _items(self, value: Any, depth: int, seen: dict[int, Any]) -> Iterator[Any]:
        if len(value) > _MOST_ITEMS:
            return
        for item in value.items() if isinstance(value, dict) else value:
            parts = item if isinstance(value, dict) else (item,)
            yield tuple(self._of(part, depth - 1, seen) for part in parts)


def _named_values(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        for name, value in list(module.__dict__.items()):
            if name not in _DICTS:
                yield f"{path}.{name}".lstrip("."), value
    classes, files = code_of(model)
    for cls in classes:
        for name, value in list(vars(cls).items()):
            if not name.startswith("__") and isinstance(value, (*_PLAIN, *_CONTAINERS)):
                yield f"{cls.__qualname__}.{name}", value
    for file in files:
        for name, value in list(vars(sys.modules[file]).items()) if file in sys.modules else ():
            if not name.startswith("__") and isinstance(value, (*_PLAIN, *_CONTAINERS)):
                yield f"{file}.{name}", value


def generator_states() -> dict[str, Any]:
    """Return the states of the generators that belong to no object: Python's, and numpy's if it is there."""
    states: dict[str, Any] = {"random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        kind, keys, *rest = numpy.random.get_state()
        states["numpy.random"] = (kind, keys.tobytes(), *rest)
    return states


class KeptGenerators:
    """Puts the states of these generators back, so that a trace draws nothing that the user's own code would draw."""

    def __enter__(self) -> KeptGenerators:
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None and hasattr(numpy, "random") else None
        return self

    def __exit__(self, *_: object) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def seed(self, seed: int) -> None:
        """Start all of them from a seed."""
        random.seed(seed)
        if self._numpy is not None:
            sys.modules["numpy"].random.seed(seed)
