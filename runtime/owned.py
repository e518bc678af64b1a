"""Gradients share no memory, though a graph may return one tensor twice."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.passes.torch_private import StorageWeakRef


class Owned:
    """Hands out tensors that share no memory with each other or with tensors given before.

    Gradients are changed in place (accumulation, clipping, unscaling), so two of them must never be one memory.
    """

    def __init__(self, taken: Sequence[Tensor]) -> None:
        # Weak references keep the identity of a storage from being used again, but not its memory.
        self._taken = {StorageWeakRef(tensor.untyped_storage()) for tensor in taken}

    def take(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or a copy when its memory is taken or not contiguous."""
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage in self._taken or not tensor.is_contiguous():
            return tensor.clone(memory_format=torch.contiguous_format)
        self._taken.add(storage)
        return tensor
