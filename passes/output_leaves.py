"""What a module returns, as leaves with paths; and which of them is the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.errors import CaptureError


def flatten_outputs(result: Any) -> tuple[list[str], list[Any], pytree.TreeSpec]:
    """Return paths, leaves and spec of any nesting of containers and dataclasses.

    Dataclasses that pytree does not know yet are made known to it, so that a result can be put together again.

    Raises:
        CaptureError: a leaf is an object of another kind with tensors in it.
    """
    while True:
        leaves, spec = pytree.tree_flatten(result)
        unknown = {type(leaf) for leaf in leaves if dataclasses.is_dataclass(leaf)}
        if not unknown:
            paths = list(_paths(result))
            _refuse_hidden_tensors(paths, leaves)
            return paths, leaves, spec
        for cls in sorted(unknown, key=lambda cls: f"{cls.__module__}.{cls.__qualname__}"):
            pytree.register_dataclass(cls)


def _refuse_hidden_tensors(paths: list[str], leaves: list[Any]) -> None:
    for path, leaf in zip(paths, leaves):
        if not isinstance(leaf, Tensor) and holds_tensors(leaf, depth=4):
            raise CaptureError(
                f"the model's output {path or 'as a whole'} is a {type(leaf).__name__}, which holds tensors that "
                "autopar can't see. Leave it out (a cache with use_cache=False, for instance), or make its class known "
                "to torch.utils._pytree.register_pytree_node."
            )


def holds_tensors(value: Any, depth: int) -> bool:
    """Tell whether there is a tensor in an object, at most ``depth`` attributes or items deep."""
    if isinstance(value, Tensor):
        return True
    if depth == 0 or isinstance(value, type):
        return False
    inside: list[Any] = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, Mapping):
        inside += value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside += value
    return any(holds_tensors(item, depth - 1) for item in inside)


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
