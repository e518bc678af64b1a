"""Copy a module, also one that holds tensors with a history."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


def copy_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a deep copy of ``model``; attributes that were computed from parameters lose how they were.

    ``torch.nn.utils.weight_norm``, and caches, leave such tensors in a module, which computes them anew in its
    forward. Torch copies none of them, so one of them would keep the whole module from being copied.

    Args:
        memo: what to take for an object of the given id, as in ``copy.deepcopy``.

    Raises:
        TypeError, RuntimeError: the module holds something else that can't be copied.
    """
    memo = {} if memo is None else memo
    for module in model.modules():
        for leaf in pytree.tree_leaves(list(vars(module).values())):
            if isinstance(leaf, torch.Tensor) and not leaf.is_leaf:
                memo.setdefault(id(leaf), leaf.detach().clone())
    return copy.deepcopy(model, memo)
