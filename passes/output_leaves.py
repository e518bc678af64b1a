"""What a module returns, as leaves with paths; and which of them is the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def flatten_outputs(result: Any) -> tuple[list[str], list[Any], pytree.TreeSpec]:
    """Return paths, leaves and spec of any nesting of containers and dataclasses.

    Dataclasses that pytree does not know yet are made known to it, so that a result can be put together again.
    """
    while True:
        leaves, spec = pytree.tree_flatten(result)
        unknown = {type(leaf) for leaf in leaves if dataclasses.is_dataclass(leaf)}
        if not unknown:
            return list(_paths(result)), leaves, spec
        for cls in sorted(unknown, key=lambda cls: f"{cls.__module__}.{cls.__qualname__}"):
            pytree.register_dataclass(cls)


def _paths(result: Any) -> Iterator[str]:
    """Yield the path of every leaf, in pytree's order."""
    children, kind = _children(result)
    if not kind:
        yield ""
        return
    for key, child in children:
        for rest in _paths(child):
            yield f"{key}{rest}"


def _children(node: Any) -> tuple[list[tuple[str, Any]], bool]:
    values, spec = pytree.tree_flatten(node, is_leaf=lambda x: x is not node)
    if spec.is_leaf():
        return [], False
    if isinstance(node, Mapping):
        keys = list(node)
        if len(keys) == len(values) and all(node[key] is value for key, value in zip(keys, values)):
            return [(f"[{key!r}]", value) for key, value in zip(keys, values)], True
    if dataclasses.is_dataclass(node):
        names = [f.name for f in dataclasses.fields(node) if any(getattr(node, f.name) is v for v in values)]
        if len(names) == len(values):
            return [(f".{name}", value) for name, value in zip(names, values)], True
    return [(f"[{i}]", value) for i, value in enumerate(values)], True


def loss_of(paths: list[str], leaves: list[Any], spec: pytree.TreeSpec) -> int | None:
    """Return the position of the scalar loss among output leaves; None when there is none.

    It is the leaf called ``loss``, or a scalar that the module returns alone or first of a tuple.
    """
    for i, path in enumerate(paths):
        if path in ("['loss']", ".loss") and _is_scalar(leaves[i]):
            return i
    alone_or_first = paths and (paths[0] == "" or (paths[0] == "[0]" and spec.type in (tuple, list)))
    return 0 if alone_or_first and _is_scalar(leaves[0]) else None


def _is_scalar(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() == 0 and leaf.requires_grad and leaf.dtype.is_floating_point
