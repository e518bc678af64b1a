"""Which results of a program may be handed out as they are: those in whose memory nothing else lies.

Gradients are changed in place (accumulation, clipping, unscaling), so two of them must never be one memory. Parts of
one buffer that lie side by side are not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from autopar.passes.collective_calls import WAIT, is_coalesced
from autopar.passes.improve.memories import Memories
from autopar.passes.improve.setting import Setting
from autopar.passes.program import is_getitem
from autopar.passes.torch_private import StorageWeakRef


class Owned:
    """Hands out tensors that share no memory with each other or with tensors given before.

    Args:
        taken: tensors given before.
    """

    def __init__(self, taken: Sequence[Tensor]) -> None:
        # Weak references keep the identity of a storage from being used again, but not its memory.
        self._taken: dict[Any, list[tuple[int, int]]] = {
            StorageWeakRef(tensor.untyped_storage()): [(0, sys.maxsize)] for tensor in taken
        }

    def take(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or a copy when its memory is taken or not contiguous."""
        if not tensor.is_contiguous():
            return contiguous_copy(tensor)
        spans = self._taken.setdefault(StorageWeakRef(tensor.untyped_storage()), [])
        start = int(tensor.storage_offset()) * tensor.element_size()
        end = start + tensor.nbytes
        if any(start < other_end and other_start < end for other_start, other_end in spans):
            return contiguous_copy(tensor)
        spans.append((start, end))
        return tensor


def contiguous_copy(tensor: Tensor) -> Tensor:
    """Return a copy that lies in memory in the order of its elements."""
    import torch

    return tensor.clone(memory_format=torch.contiguous_format)


def lone_results(module: fx.GraphModule, setting: Setting) -> tuple[bool, ...]:
    """Tell of every result of a lowered graph whether it is known to lie alone in memory that the graph made.

    Of others it is not known: they go through ``Owned``. A part of a collective that runs over one buffer lies beside
    the other parts.
    """
    (ends,) = module.graph.output_node().args
    assert isinstance(ends, (tuple, list))
    memories = Memories(module.graph, setting)
    nodes = [end for end in ends if isinstance(end, fx.Node)]
    return tuple(isinstance(end, fx.Node) and _is_lone(end, nodes, memories) for end in ends)


def _is_lone(end: fx.Node, ends: Sequence[fx.Node], memories: Memories) -> bool:
    if ends.count(end) > 1:
        return False
    source = end.args[0] if end.target is WAIT else None
    if isinstance(source, fx.Node) and is_getitem(source) and is_coalesced(source.args[0]):  # type: ignore[arg-type]
        return True
    return not memories.is_foreign(end) and not any(memories.same(end, other) for other in ends if other is not end)
