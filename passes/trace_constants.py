"""Values that Python reads from tensors which do not depend on any input: computed for real, once, when asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from . import torch_private
from .program import is_random

READS = frozenset({
    Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__contains__,
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__,
})  # fmt: skip
"""Torch functions that hand a tensor's value to Python."""

_MOST_ELEMENTS = 1 << 24


class NotConstant(Exception):
    """The tensor depends on an input, on a parameter or on random numbers, or is too large to be computed here."""


class Constants:
    """The constants of one trace, by the node that computes them."""

    def __init__(self) -> None:
        self._values: dict[fx.Node, Any] = {}

    def read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """Return ``func(*args, **kwargs)`` computed on constants.

        Raises:
            NotConstant: an operand is no constant.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        values = [self._value(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(values, spec)
        with torch_private.outside_of_trace():
            return func(*args, **(kwargs or {}))

    def _value(self, tensor: Tensor) -> Tensor:
        node = torch_private.node_of(tensor)
        if node is None:
            if not torch_private.is_real(tensor):
                raise NotConstant
            return tensor
        self._compute(node)
        value: Tensor = self._values[node]
        return value

    def made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the tensors of ``func(*args, **kwargs)``, whose shapes depend on constants alone, as new constants.

        Raises:
            NotConstant: an operand is no constant, or the result holds no tensor.
        """
        result = self.read(func, args, kwargs)
        if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
            raise NotConstant
        return pytree.tree_map_only(Tensor, torch_private.as_constant, result)

    def listed(self, index: Any) -> Any:
        """Return an index in which constant masks are lists of the places that they keep, whose number is known.

        Constants that bound a slice are numbers.
        """
        parts = index if isinstance(index, tuple) else (index,)
        out: list[Any] = []
        for part in parts:
            if isinstance(part, slice):
                part = slice(*map(self._bound, (part.start, part.stop, part.step)))
            if isinstance(part, Tensor) and part.dtype is torch.bool and part.dim() > 0:
                try:
                    places = self.read(Tensor.nonzero, (part,))
                except NotConstant:
                    return index
                out += [torch_private.as_constant(column.contiguous()) for column in places.unbind(1)]
            else:
                out.append(part)
        return tuple(out)

    def _bound(self, bound: Any) -> Any:
        try:
            return self.read(Tensor.item, (bound,)) if isinstance(bound, Tensor) else bound
        except NotConstant:
            return bound

    def _compute(self, node: fx.Node) -> None:
        for needed in _in_order(node, self._values):
            if needed.op == "get_attr":
                self._values[needed] = torch_private.constant_of(str(needed.target))
            else:
                with torch_private.outside_of_trace(), torch.no_grad():
                    self._values[needed] = self._run(needed)
            if self._values[needed] is None:
                raise NotConstant

    def _run(self, node: fx.Node) -> Any:
        sizes = [t.numel() for t in pytree.tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]
        if node.op != "call_function" or is_random(node) or sum(sizes) > _MOST_ELEMENTS:
            return None
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: self._values[n])
        function: Any = node.target
        return function(*args, **kwargs)


def _in_order(node: fx.Node, known: dict[fx.Node, Any]) -> list[fx.Node]:
    """Return what ``node`` is computed from, and itself, operands first."""
    order: list[fx.Node] = []
    done = set(known)
    stack = [(node, False)]
    while stack:
        current, ready = stack.pop()
        if ready:
            order.append(current)
        elif current not in done:
            if current.op == "placeholder":
                raise NotConstant
            done.add(current)
            stack.append((current, True))
            stack.extend((operand, False) for operand in current.all_input_nodes)
    return order
