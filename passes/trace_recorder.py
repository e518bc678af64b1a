"""What is known about each traced node: phase, module path, the user's line, the forward node of a backward one."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import fx, nn

from . import torch_private

_PASSES = os.path.dirname(os.path.abspath(__file__))
_OWN = os.path.dirname(_PASSES)
_CAPTURE = os.path.join(_PASSES, "capture.py")
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_TRACING = (_PASSES + os.sep, os.path.join(_TORCH, "_subclasses") + os.sep)
_FOREIGN = (_TORCH + os.sep, _PASSES + os.sep, _OWN + os.sep, "<")


def is_user_file(filename: str) -> bool:
    """Tell whether code in ``filename`` is the user's: neither torch's, nor ours, nor generated."""
    return not filename.startswith(_FOREIGN) and not filename.endswith(("contextlib.py", "functools.py"))


def first_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame at or above ``frame`` that is not of the tracing itself: the user's, or torch's."""
    while frame is not None and frame.f_code.co_filename.startswith(_TRACING):
        frame = frame.f_back
    return frame


def user_line(frame: FrameType | None) -> str:
    """Return ``file:line: code`` of the model's innermost frame at or above ``frame``; empty if there is none."""
    while frame is not None and frame.f_code.co_filename != _CAPTURE:  # above it is the call of autopar
        if is_user_file(frame.f_code.co_filename):
            return _line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def raising_line(traceback: TracebackType | None) -> str:
    """Return ``file:line: code`` of the innermost user frame of an exception; empty if there is none."""
    found = ""
    while traceback is not None:
        if is_user_file(traceback.tb_frame.f_code.co_filename):
            found = _line(traceback.tb_frame.f_code.co_filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def raising_module(traceback: TracebackType | None, model: nn.Module) -> str:
    """Return class and path of the innermost module of ``model`` that an exception came through; empty if none did."""
    paths = {id(module): path for path, module in model.named_modules()}
    found = ""
    while traceback is not None:
        module = traceback.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in paths:
            path = paths[id(module)]
            found = f"{type(module).__name__} {path!r}" if path else type(module).__name__
        traceback = traceback.tb_next
    return found


def _line(filename: str, number: int) -> str:
    return f"{filename}:{number}: {linecache.getline(filename, number).strip()}"


class TraceRecorder:
    """Marks nodes as they are made.

    Attributes:
        source: the user's line that runs now.
        phase: ``"forward"`` or ``"backward"``.
        differentiable: gradients are enabled in the user's code.
        after: id of a module that runs -> what to do to its result.
    """

    def __init__(self, model: nn.Module) -> None:
        self.source = ""
        self.phase = "forward"
        self.differentiable = True
        self.after: dict[int, Callable[[Any], Any]] = {}
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._stack: list[str] = [""]
        self._forward_by_sequence: dict[int, fx.Node] = {}

    def at_user_line(self) -> str:
        """Return the user's line that calls into torch now."""
        return user_line(sys._getframe(1))

    @contextmanager
    def watching(self, graph: fx.Graph) -> Iterator[None]:
        """Mark the nodes of ``graph`` that are made inside."""
        make = graph.create_node

        def create_node(*args: Any, **kwargs: Any) -> fx.Node:
            node = make(*args, **kwargs)
            self._mark(node)
            return node

        graph.create_node = create_node  # type: ignore[method-assign]
        enter = torch_private.register_module_forward_pre_hook(self._enter)
        leave = torch_private.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            enter.remove()
            leave.remove()
            del graph.create_node

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._paths.get(id(module), self._stack[-1]))

    def _leave(self, module: nn.Module, args: Any, result: Any) -> Any:
        self._stack.pop()
        change = self.after.pop(id(module), None)
        return None if change is None else change(result)

    def _mark(self, node: fx.Node) -> None:
        node.meta["phase"] = self.phase
        if self.phase == "forward":
            node.meta["module"], node.meta["source"] = self._stack[-1], self.source
            node.meta["differentiable"] = self.differentiable
            if node.op == "call_function":
                self._forward_by_sequence.setdefault(torch_private.last_forward_sequence(), node)
            return
        sequence = torch_private.current_backward_sequence()
        forward = None if sequence is None else self._forward_by_sequence.get(sequence)
        if forward is None:
            forward = next((a for a in node.all_input_nodes[::-1] if a.meta.get("phase") == "backward"), None)
            forward = None if forward is None else forward.meta.get("forward_node")
        node.meta["module"] = "" if forward is None else forward.meta["module"]
        node.meta["source"] = "" if forward is None else forward.meta["source"]
        if forward is not None:
            node.meta["forward_node"] = forward
