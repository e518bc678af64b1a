"""``tensor.data``: what is put there is a write, and what is read there writes to the tensor; a trace sees neither."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from autopar.errors import CaptureError

from . import torch_private
from .trace_flat import FlatViews
from .trace_recorder import first_frame, user_line

DATA: Any = torch.Tensor.data


def read_data(tensor: Tensor) -> Tensor:
    """Return a tensor without its gradient; writes to it are counted as writes to a tensor that is not traced."""
    value: Tensor = tensor.detach() if torch_private.unwrap(tensor) is tensor else DATA.__get__(tensor)
    return value


def set_data(flat: FlatViews, tensor: Tensor, value: Tensor) -> None:
    """Let a tensor take the memory of another one.

    Raises:
        CaptureError: the tensor is not traced, or has a gradient, whose slope would be taken at other values.
    """
    line = user_line(first_frame(sys._getframe(1)))
    place = f" at {line}" if line else ""
    if torch_private.unwrap(tensor) is tensor:
        raise CaptureError(
            f"the model replaces the .data of a tensor that is neither parameter nor buffer{place}, so the next step "
            "would not see it. Register it with register_buffer."
        )
    if tensor.grad_fn is not None:
        raise CaptureError(
            f"the model replaces the .data of a tensor that has a gradient{place}, which a trace can't follow. "
            "Write x = x + (value - x).detach() for a new value with the old gradient."
        )
    with torch.no_grad():
        tensor.set_(value.detach())  # type: ignore[call-overload]


REWRITES: dict[Any, Any] = {DATA.__set__: set_data}
