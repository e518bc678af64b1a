"""The old place of ``autopar.plans``: ``autopar.plan`` is the function that makes a plan, and this goes away."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from autopar.plans import *  # noqa: F403


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from importlib import import_module

        return import_module("autopar.api").plan(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
