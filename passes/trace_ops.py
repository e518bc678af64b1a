"""The front end of capture: torch functions are seen before ATen takes them apart, and some are traced as other ops.

``trace_matmul``, ``trace_attention``, ``trace_bags``, ``trace_ctc``, ``trace_data``, ``trace_indexing``,
``trace_linalg``, ``trace_loss``, ``trace_pooling`` and ``trace_random`` hold the rewrites, one function a family. A
rewrite returns ``NotImplemented`` where it does not apply; the function then runs as it is. Functions of
``torch.nn.functional`` that are written in Python are entered, so that what they call is seen too; one that hands
itself over again inside (``meshgrid`` does) then runs as it is.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.errors import CaptureError

from . import (
    torch_private,
    trace_attention,
    trace_bags,
    trace_ctc,
    trace_data,
    trace_indexing,
    trace_linalg,
    trace_loss,
    trace_matmul,
    trace_pooling,
    trace_random,
)
from .trace_checks import passing_number, passing_value
from .trace_constants import READS, Constants, NotConstant
from .trace_encoder import padded_encoder
from .trace_flat import FlatViews
from .trace_places import Places
from .trace_recorder import TraceRecorder, first_frame, user_line

Rewrite = Callable[..., Any]

REWRITES: dict[Any, Rewrite] = {
    **trace_matmul.REWRITES,
    **trace_attention.REWRITES,
    **trace_bags.REWRITES,
    **trace_ctc.REWRITES,
    **trace_data.REWRITES,
    **trace_indexing.REWRITES,
    **trace_linalg.REWRITES,
    **trace_loss.REWRITES,
    **trace_pooling.REWRITES,
    **trace_random.REWRITES,
}
"""Torch function -> rewrite; a rewrite takes the flat views, then the function's own arguments."""

_DIFFERENTIATED = frozenset(REWRITES) - frozenset(trace_random.REWRITES)
"""Rewrites that bring a gradient of their own, which the transforms of ``torch.func`` do not know."""

MASKED = (torch.Tensor.__getitem__, torch.Tensor.masked_select, torch.masked_select)
"""Functions that read at a mask, whose result has a known shape when the mask is a constant."""

REPEATED = (torch.Tensor.repeat_interleave, torch.repeat_interleave)
"""Functions whose result has a known shape when the numbers of repeats are constants."""

_ENTERED_MODULES = ("torch.nn.functional", "torch.functional")
_GUARDS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


class TraceOps(TorchFunctionMode):
    """Rewrites torch functions while a model is traced, and keeps the recorder at the user's line."""

    def __init__(self, recorder: TraceRecorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.flat = FlatViews()
        self.constants = Constants()
        self.places = Places()
        self._inside: list[Any] = []
        self._mirrored = torch.is_autocast_enabled("cuda")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = _default_generator(func, kwargs or {})
        if getattr(func, "__name__", "") == "__get__":
            return trace_data.read_data(*args) if func == trace_data.DATA.__get__ else func(*args, **kwargs)
        outermost = not self.recorder.source
        if outermost:
            self.recorder.source = self.recorder.at_user_line()
            self.recorder.differentiable = torch.is_grad_enabled()
        try:
            with self._autocast() if outermost else nullcontext():
                return self._call(func, *_on_cpu(func, args, kwargs))
        finally:
            if outermost:
                self.recorder.source = ""

    def _autocast(self) -> AbstractContextManager[Any]:
        """Return a context in which CPU autocast, which the trace obeys, follows the autocast of CUDA.

        Where that one was on around the trace, CPU autocast was switched on for it, so both must still be on.
        """
        cpu, cuda = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
        wanted = cpu and cuda if self._mirrored else cpu or cuda
        if wanted == cpu:
            return nullcontext()
        return torch.autocast("cpu", dtype=torch.get_autocast_dtype("cuda"), enabled=wanted)

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in READS:
            return self._read(func, args, kwargs)
        if func in MASKED:
            args = _indexed(*args, **kwargs) if func is not torch.Tensor.__getitem__ else args
            func, args, kwargs = torch.Tensor.__getitem__, (args[0], self.constants.listed(args[1])), {}
        elif func is torch.Tensor.__setitem__ and trace_indexing.differs_by_place(*args):
            args = (args[0], self.constants.listed(args[1]), args[2])
        if func in REPEATED:
            args, kwargs = self._repeated(*args, **kwargs)
        try:
            return self._trace(func, args, kwargs)
        except torch_private.DATA_DEPENDENT:
            try:
                return self.constants.made(func, args, kwargs)
            except NotConstant:
                pass
            result = self.places.call(func, args, self.recorder.source)
            if result is NotImplemented:
                raise
            return result

    def _repeated(self, input: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of ``repeat_interleave`` with the length of its result where that is a constant."""
        repeats = args[0] if args else kwargs.get("repeats")
        if isinstance(repeats, Tensor) and repeats.numel() > 1 and kwargs.get("output_size") is None:
            with suppress(NotConstant):
                kwargs = {**kwargs, "output_size": int(self.constants.read(Tensor.sum, (repeats,)))}
        return (input, *args), kwargs

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Hand a value to Python: that of a constant, or the one with which a check of values passes."""
        try:
            return self.constants.read(func, args)
        except NotConstant:
            frame = first_frame(sys._getframe(1))
            passing: Any = None
            if func in (torch.Tensor.__bool__, torch.Tensor.item) and args[0].dtype is torch.bool:
                passing = passing_value(frame)
            elif func is torch.Tensor.item:
                passing = passing_number(frame)
            if passing is not None:
                return passing
            if func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__):
                raise torch_private.DATA_DEPENDENT[0](func) from None
        return func(*args, **kwargs)

    def _trace(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch._nested_tensor_from_mask_left_aligned:
            found = padded_encoder(sys._getframe(1), args[1])
            if found is not None:
                self.recorder.after[id(found[0])] = found[1]
            return False
        kwargs = _with_all_arguments(sys._getframe(1), func, args, kwargs)
        rewrite = None if func in _DIFFERENTIATED and torch_private.is_transforming() else REWRITES.get(func)
        if rewrite is not None:
            result = rewrite(self.flat, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if _is_entered(func) and func not in self._inside:
            self._inside.append(func)
            try:
                with self:
                    return _without_guards(func)(*args, **kwargs)
            finally:
                self._inside.pop()
        return self.flat.follow(func, args, kwargs, func(*args, **kwargs))


def _indexed(input: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return tensor and index of a selection by a mask; they broadcast with each other."""
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    return input.expand(shape), mask.expand(shape)


def _is_entered(func: Any) -> bool:
    return isinstance(func, FunctionType) and func.__globals__["__name__"] in _ENTERED_MODULES


def _with_all_arguments(frame: FrameType | None, func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords with those that ``func`` was called with but did not hand over (``l1_loss`` drops weights).

    A function of torch in Python hands itself over before it does anything, so its frame holds them still.
    """
    if not _is_entered(func):
        return kwargs
    while frame is not None and frame.f_code is not func.__code__:
        frame = frame.f_back
    if frame is None:
        return kwargs
    code = func.__code__
    given = {*code.co_varnames[: len(args)], *kwargs}
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    dropped = {name: frame.f_locals[name] for name in names if name not in given and name in frame.f_locals}
    return {**kwargs, **{name: value for name, value in dropped.items() if value is not _default_of(func, name)}}


@lru_cache(maxsize=4096)
def _default_of(func: FunctionType, name: str) -> Any:
    parameter = inspect.signature(func).parameters[name]
    return parameter.default


@lru_cache(maxsize=512)
def _without_guards(func: FunctionType) -> FunctionType:
    """Return ``func`` with its own look-out for torch function modes switched off; what it calls is still seen."""
    scope = {**func.__globals__, **dict.fromkeys(_GUARDS, _never)}
    entered = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    entered.__kwdefaults__ = func.__kwdefaults__
    return entered


def _never(*args: Any) -> bool:
    return False


def _default_generator(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments without a generator; numbers are drawn from the default one.

    Raises:
        CaptureError: it is another one, whose state no program could carry on.
    """
    generator = kwargs.get("generator")
    if not isinstance(generator, torch.Generator):
        return kwargs
    if generator is not torch.default_generator:
        line = user_line(sys._getframe(1))
        raise CaptureError(
            f"{getattr(func, '__name__', func)} draws from a torch.Generator of the model's own"
            f"{f' at {line}' if line else ''}, whose state a compiled program can't carry on. Draw from the default "
            "generator (leave generator= out), or outside of the model and pass the numbers in."
        )
    return {key: value for key, value in kwargs.items() if key != "generator"}


def _on_cpu(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments with every device but meta replaced by the CPU, on which the trace runs."""
    if func is torch.Tensor.cuda:
        return args[:1], {}
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": _cpu(kwargs["device"])}
    if func is torch.Tensor.to:
        args = (args[0], *(_cpu(a) if isinstance(a, (str, torch.device)) else a for a in args[1:]))
    return args, kwargs


def _cpu(device: Any) -> Any:
    return device if str(device).startswith("meta") else torch.device("cpu")
