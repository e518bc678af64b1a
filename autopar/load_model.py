"""Find the model that the command line names: a function of a module or of a file, called without arguments."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autopar.errors import InputError

_FORM = "write package.module:function or path/file.py:function"


@dataclass(frozen=True)
class ModelCase:
    """A model with example inputs."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


def load_model(name: str, device: str | None = None) -> ModelCase:
    """Return the model that the function called ``name`` builds.

    Args:
        name: ``package.module:function``, looked for in the current folder too, or ``path/file.py:function``. The
            function takes nothing and returns ``(model, args)`` or ``(model, args, kwargs)``.
        device: where to build it (``"meta"`` makes a model of any size at no cost); by default the function decides.

    Raises:
        InputError: there is no such function, or it returns something else. What the function raises goes through.
    """
    where, colon, function = name.rpartition(":")
    if not colon or not where or not function:
        raise InputError(f"{name!r} names no function; {_FORM}")
    module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    build = getattr(module, function, None)
    if not callable(build):
        known = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise InputError(f"{where} has no function {function!r}; it has {', '.join(known) or 'none'}")
    if device is None:
        return _case(name, build())
    with torch.device(device):
        return _case(name, build())


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"there is no file {path}; {_FORM}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise InputError(f"there is no module {error.name!r}, here or installed; {_FORM}") from error


def _case(name: str, built: Any) -> ModelCase:
    parts = built if isinstance(built, tuple) else (built,)
    well_formed = (
        len(parts) in (2, 3)
        and isinstance(parts[0], nn.Module)
        and isinstance(parts[1], (tuple, list))
        and (len(parts) == 2 or isinstance(parts[2], Mapping))
    )
    if not well_formed:
        found = ", ".join(type(part).__name__ for part in parts)
        raise InputError(f"{name} returned ({found}); it must return (model, args) or (model, args, kwargs)")
    return ModelCase(parts[0], tuple(parts[1]), dict(parts[2]) if len(parts) == 3 else {})
