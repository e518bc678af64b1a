"""The signature of a call: everything about its inputs and modes that a program is traced for."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.errors import InputError
from autopar.runtime.agree import word_of

CONSTANTS = (int, float, str, bool, complex, type(None), torch.dtype, torch.device, enum.Enum)


@dataclass(frozen=True)
class Signature:
    """What a program depends on besides the module, as lines that can be compared and shown.

    Attributes:
        lines: one a fact: the tree, each leaf, the modes.
        gradient: the program needs a backward.
    """

    lines: tuple[str, ...]
    gradient: bool

    @cached_property
    def word(self) -> int:
        """A digest of the lines: equal signatures have equal ones, and different ones hardly ever."""
        return word_of(self.lines)


@dataclass(frozen=True)
class Call:
    """The inputs of one call, taken apart.

    Attributes:
        args, kwargs: as given, keywords sorted.
        leaves: the flat leaves of ``(args, kwargs)``.
        signature: what the program for them depends on.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: tuple[Any, ...]
    signature: Signature


def take_apart(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device | None) -> Call:
    """Return a call with its signature.

    Args:
        module: the module whose modes and gradient flags count.
        args, kwargs: the inputs.
        device: where input tensors must lie; None to accept any (an example).

    Raises:
        InputError: a leaf is neither a plain tensor nor a plain constant, or lies on another device.
    """
    kwargs = dict(sorted(kwargs.items()))
    paths, spec = pytree.tree_flatten_with_path((args, kwargs))
    leaves = tuple(leaf for _, leaf in paths)
    lines = [f"inputs {_tree_text(spec)}"]
    lines += [_leaf_line(_path_name(path), leaf, device) for path, leaf in paths]
    lines += _mode_lines(module)
    wants = any(parameter.requires_grad for parameter in module.parameters())
    wants = wants or any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
    gradient = torch.is_grad_enabled() and wants
    lines.append(f"gradient {gradient}")
    return Call(args, kwargs, leaves, Signature(tuple(lines), gradient))


def _tree_text(spec: pytree.TreeSpec) -> str:
    """Return a structure as its values would print, with a ``*`` for every leaf: ``((*, *), {'y': *})``."""
    if spec.is_leaf():
        return "*"
    children = [_tree_text(child) for child in spec.children()]
    if spec.type is dict:
        return "{" + ", ".join(f"{key!r}: {child}" for key, child in zip(spec.context, children, strict=True)) + "}"
    inside = ", ".join(children)
    if spec.type is tuple:
        return f"({inside},)" if len(children) == 1 else f"({inside})"
    if spec.type is list:
        return f"[{inside}]"
    return f"{spec.type.__module__}.{spec.type.__qualname__}<{spec.context}>({inside})"


def _path_name(path: Sequence[Any]) -> str:
    root = ("args", "kwargs")[path[0].idx]
    return root + pytree.keystr(tuple(path[1:]))


def _leaf_line(name: str, leaf: Any, device: torch.device | None) -> str:
    if isinstance(leaf, DTensor):
        raise InputError(f"{name} is a DTensor; pass the full tensor (inputs='global') or the share (inputs='local')")
    if isinstance(leaf, torch.Tensor):
        if device is not None and leaf.device != device:
            raise InputError(f"{name} is on {leaf.device}, but the mesh runs on {device}; move it there first")
        if leaf.layout != torch.strided or leaf.is_nested:
            raise InputError(
                f"{name} is a tensor of the layout {leaf.layout}; autopar splits dense ones: pass {name}.to_dense(), "
                "or its indices and values as inputs of their own"
            )
        return f"{name} {leaf.dtype}{list(leaf.shape)}{' with gradient' if leaf.requires_grad else ''}"
    if isinstance(leaf, CONSTANTS):
        return f"{name} = {leaf!r}"
    raise InputError(
        f"{name} is a {type(leaf).__name__}, which is neither a tensor nor a plain constant; pass tensors, numbers, "
        "texts, None, or containers of them (for a class of your own, register it with torch.utils._pytree)"
    )


def _mode_lines(module: nn.Module) -> list[str]:
    training = module.training
    odd = [name for name, child in module.named_modules() if child.training != training]
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    lines = [f"training {training}", f"modules in the other mode: {odd}", f"frozen {frozen}"]
    for device_type in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device_type):
            lines.append(f"autocast {device_type} {torch.get_autocast_dtype(device_type)}")
    return lines


def checksum(leaves: Sequence[Any]) -> int:
    """Return a checksum of the contents of all tensors among ``leaves``; it reads them on the host."""
    total = 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            data = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            total = zlib.crc32(data.numpy().data, total)
    return total
