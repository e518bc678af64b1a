"""Recognises calls that were taken apart before, without walking the module tree or writing its modes as text."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.runtime.signature import Call, Signature, take_apart


class KnownCalls:
    """The calls of one module by all that their signatures depend on.

    Only a call that was checked before is recognised; any other goes through ``take_apart``. Where the tensors of the
    module hang is remembered too, until a part of it is replaced.

    Args:
        root: the module whose modes and gradient flags count.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = (root,)
        self._signatures: dict[Hashable, Signature] = {}
        self._read_tree()

    def _read_tree(self) -> None:
        self._signatures.clear()
        root = self._root[0]
        self._modules = list(root.modules())
        self._children = [(module._modules, dict(module._modules)) for module in self._modules]
        self._parameters, self._buffers = [
            [
                (f"{prefix}.{key}" if prefix else key, tensors, key)
                for prefix, module in root.named_modules(remove_duplicate=False)
                for tensors in (getattr(module, kind),)
                for key, tensor in tensors.items()
                if tensor is not None
            ]
            for kind in ("_parameters", "_buffers")
        ]

    def parameters(self) -> dict[str, Tensor]:
        """Return full name -> parameter, as they are now; tied ones under all their names."""
        return {name: tensors[key] for name, tensors, key in self._parameters}

    def buffers(self) -> dict[str, Tensor]:
        """Return full name -> buffer, as they are now."""
        return {name: tensors[key] for name, tensors, key in self._buffers}

    def take_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Call:
        """Return a call with its signature, as ``signature.take_apart`` does.

        Raises:
            InputError: an input is of a kind that a program can't take.
        """
        if not all(now == before for now, before in self._children):
            self._read_tree()
        kwargs = dict(sorted(kwargs.items()))
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = self._key(leaves, spec)
        known = self._signatures.get(key)
        if known is not None:
            return Call(args, kwargs, tuple(leaves), known)
        call = take_apart(self._root[0], args, kwargs, device)
        self._signatures[key] = call.signature
        return call

    def _key(self, leaves: list[Any], spec: pytree.TreeSpec) -> Hashable:
        casts = tuple(
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in ("cpu", "cuda")
        )
        return (
            spec,
            tuple(map(_facts, leaves)),
            tuple(module.training for module in self._modules),
            tuple(tensors[key].requires_grad for _, tensors, key in self._parameters),
            torch.is_grad_enabled(),
            casts,
        )


def _facts(leaf: Any) -> Hashable:
    """Return all that decides whether an input is taken, and how."""
    if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
        return leaf.dtype, leaf.shape, leaf.requires_grad, leaf.device, leaf.layout, leaf.is_nested
    return type(leaf), repr(leaf)
