"""Leave a model as it was, whatever it does to its own modules while it is traced."""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict, deque
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from autopar.errors import CaptureError

from .function_caches import PreservedCaches


class PreservedModel:
    """Takes note of every module's attributes on entry and puts them back on exit.

    So are the contents of attributes that are plain containers: hooks that a module registers when it is first run, or
    what it keeps in a dict, would otherwise stay behind while the attribute that tells of it is put back. Functions
    that remember their results forget those of the trace.

    Tensors that are plain attributes, neither parameters nor buffers, are replaced by copies inside, so that writes in
    place do not reach them either. ``refuse_state`` tells a cache, which may be filled, from state, which must be a
    buffer.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.named_modules())
        self._owned = {id(t) for t in itertools.chain(model.parameters(), model.buffers())}
        self._before: list[tuple[dict[str, Any], ...]] = []
        self._copies: dict[str, Tensor] = {}
        self._replaced: set[str] = set()
        self._computed: set[str] = set()
        self._contents: list[tuple[Any, Any]] = []
        self._caches = PreservedCaches(model)

    def __enter__(self) -> PreservedModel:
        for path, module in self._modules:
            parts = (module.__dict__, module._parameters, module._buffers, module._modules)
            self._before.append(tuple(dict(part) for part in parts))
            held = [value for name, value in module.__dict__.items() if name not in _DICTS]
            self._contents += [(value, value.copy()) for value in held if type(value) in _CONTAINERS]
            for name, value in list(module.__dict__.items()):
                if isinstance(value, Tensor) and id(value) not in self._owned:
                    copy = value.detach().clone().requires_grad_(value.requires_grad)
                    full = f"{path}.{name}".lstrip(".")
                    module.__dict__[name] = self._copies[full] = copy
                    if not value.is_leaf:
                        self._computed.add(full)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: TracebackType | None) -> None:
        for (path, module), saved in zip(self._modules, self._before):
            for name, value in module.__dict__.items():
                full = f"{path}.{name}".lstrip(".")
                if full in self._copies and value is not self._copies[full]:
                    self._replaced.add(full)
            # The attributes come first: among them are the very dicts of parameters, buffers and children.
            for part, then in zip((module.__dict__, *(saved[0][key] for key in _DICTS)), saved):
                part.clear()
                part.update(then)
        self._caches.forget()
        for container, content in self._contents:
            container.clear()
            (container.extend if hasattr(container, "extend") else container.update)(content)

    def refuse_state(self, constants: list[Tensor]) -> None:
        """Check that no plain tensor attribute was written to, or read and then replaced, or read with a history.

        Args:
            constants: the constants that the trace reads.

        Raises:
            CaptureError: an attribute that is state and no buffer.
        """
        read = {id(tensor) for tensor in constants}
        for name, copy in self._copies.items():
            if copy._version > 0 or (name in self._replaced and id(copy) in read):
                raise CaptureError(
                    f"the model writes to its attribute {name}, a tensor that is neither parameter nor buffer, so the "
                    "next step would not see it. Register it with register_buffer."
                )
            if name in self._computed and id(copy) in read:
                raise CaptureError(
                    f"the model reads its attribute {name}, which was computed from parameters before the "
                    "forward began, so their gradient would miss what flows through it. Compute it inside forward."
                )


_DICTS = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
