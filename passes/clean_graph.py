"""Rebuild a raw traced graph without dead code, duplicates and ops that do nothing."""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from .program import is_random

aten = torch.ops.aten

_NOTHING = frozenset({
    aten.detach.default, aten.alias.default, aten.lift.default, aten.lift_fresh.default, aten.lift_fresh_copy.default,
})  # fmt: skip
_SAME_SHAPE = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.slice.Tensor,
    aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
})  # fmt: skip
_SAME_LAYOUT = frozenset({aten.clone.default, aten._to_copy.default})
_VIEW = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})
_NEUTRAL: dict[Any, tuple[Any, ...]] = {
    aten.mul.Tensor: ((1,),),
    aten.mul.Scalar: ((1,),),
    aten.div.Tensor: ((1,),),
    aten.div.Scalar: ((1,),),
    aten.pow.Tensor_Scalar: ((1,),),
    aten.add.Tensor: ((0,),),
    aten.sub.Tensor: ((0,),),
}
"""Op -> arguments with which it returns its first operand, when shape and dtype stay."""

_META = ("phase", "module", "source")


def clean_graph(raw: fx.GraphModule, placeholder_names: list[str]) -> fx.GraphModule:
    """Return a fresh graph that computes what ``raw`` computes; placeholders come first, with the given names."""
    cleaner = _Cleaner(raw)
    return cleaner.run(placeholder_names)


class _Cleaner:
    def __init__(self, raw: fx.GraphModule) -> None:
        self.raw = raw
        self.graph = fx.Graph()
        self.new: dict[fx.Node, Any] = {}
        self.seen: dict[Any, fx.Node] = {}

    def run(self, placeholder_names: list[str]) -> fx.GraphModule:
        """Rebuild the graph."""
        nodes = list(self.raw.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        for node, name in zip(placeholders, placeholder_names, strict=True):
            self.new[node] = self._finish(self.graph.placeholder(name), node)
        alive = _alive(nodes)
        for node in nodes:
            if node.op in ("get_attr", "call_function") and node in alive:
                self.new[node] = self._rebuilt(node)
        result = tuple(self._map(node) for node in nodes[-1].args[0])
        self.graph.output(result)
        self._drop_dead()
        self.graph.lint()
        return fx.GraphModule(self.raw, self.graph, "Program")

    def _drop_dead(self) -> None:
        for node in reversed(list(self.graph.nodes)):
            if node.op in ("get_attr", "call_function") and not node.users and not is_random(node):
                self.graph.erase_node(node)
        names = {node.name for node in self.graph.nodes}
        for node in self.graph.nodes:
            if node.meta.get("forward_node") not in names:
                node.meta.pop("forward_node", None)

    def _map(self, argument: Any) -> Any:
        return map_arg(argument, lambda node: self.new[node])

    def _rebuilt(self, node: fx.Node) -> fx.Node:
        if node.op == "get_attr":
            return self._constant(node)
        args, kwargs = self._map(node.args), self._map(node.kwargs)
        same = _same_as(node, args)
        if same is not None:
            return same
        if node.target in _VIEW:
            return self._view(node, args)
        return self._emit(node, node.target, *_plain_arguments(node, args, kwargs))

    def _constant(self, node: fx.Node) -> fx.Node:
        """Rebuild a constant; the same tensor is one constant, whatever it is called."""
        key = ("constant", id(getattr(self.raw, str(node.target))))
        if key not in self.seen:
            self.seen[key] = self._finish(self.graph.get_attr(str(node.target)), node)
        return self.seen[key]

    def _view(self, node: fx.Node, args: Any) -> fx.Node:
        """Rebuild a view: of the first of a chain of views, and of a sum that drops what the view drops."""
        source: fx.Node = args[0]
        shape = list(node.meta["val"].shape)
        while source.target in _VIEW and isinstance(source.args[0], fx.Node):
            source = source.args[0]
        if list(source.meta["val"].shape) == shape:
            return source
        if source.target is aten.sum.dim_IntList and len(source.args) == 3 and source.args[2]:
            operand, listed = cast(Any, source.args[:2])
            summed = operand.meta["val"]
            dims = {dim % summed.dim() for dim in listed}
            if [size for dim, size in enumerate(summed.shape) if dim not in dims] == shape:
                return self._emit(node, source.target, source.args[:2], source.kwargs)
        return self._emit(node, node.target, (source, shape), {})

    def _emit(self, node: fx.Node, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """Add an op in place of ``node``, or return an equal one of the same phase."""
        key = None
        if not is_random(node):
            key = _key((target, args, kwargs, node.meta["phase"]))
            if key in self.seen:
                return self.seen[key]
        made = self.graph.create_node("call_function", target, args, kwargs, name=_name(target))
        self._finish(made, node)
        if key is not None:
            self.seen[key] = made
        return made

    def _finish(self, made: fx.Node, node: fx.Node) -> fx.Node:
        for field in _META:
            made.meta[field] = node.meta.get(field, "")
        made.meta["val"] = node.meta["val"]
        raw_forward = node.meta.get("forward_node")
        forward = self.new.get(raw_forward) if isinstance(raw_forward, fx.Node) else None
        if isinstance(forward, fx.Node) and forward.op == "call_function":
            made.meta["forward_node"] = forward.name
        return made


def _alive(nodes: list[fx.Node]) -> set[fx.Node]:
    """Return what the output or a random op depends on; dead random ops stay, for the numbers after them."""
    alive: set[fx.Node] = set()
    for node in reversed(nodes):
        if node.op == "output" or node in alive or is_random(node):
            alive.add(node)
            alive.update(node.all_input_nodes)
    return alive


def _name(target: Any) -> str:
    return target._overloadpacket.__name__ if isinstance(target, torch._ops.OpOverload) else target.__name__


def _same_as(node: fx.Node, args: Any) -> fx.Node | None:
    """Return the operand that an op returns unchanged, or None if it does something."""
    if node.target is operator.getitem or not args or not isinstance(args[0], fx.Node):
        return None
    source, value = args[0].meta.get("val"), node.meta.get("val")
    if node.target in _NOTHING:
        return args[0]
    if not isinstance(source, Tensor) or not isinstance(value, Tensor):
        return None
    if node.target is aten.copy.default:
        other = args[1].meta["val"] if isinstance(args[1], fx.Node) else None
        same = isinstance(other, Tensor) and other.shape == value.shape and other.dtype == value.dtype
        return args[1] if same else None
    if source.shape != value.shape or source.dtype != value.dtype:
        return None
    if args[1:] in _NEUTRAL.get(node.target, ()) and not node.kwargs:
        return args[0]
    if node.target in _SAME_SHAPE:
        return args[0]
    if node.target is aten.permute.default and list(args[1]) == list(range(source.dim())):
        return args[0]
    return args[0] if node.target in _SAME_LAYOUT and source.stride() == value.stride() else None


def _plain_arguments(node: fx.Node, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments with sizes written out: no -1, no end beyond the dim; without ``pin_memory``."""
    if node.target is aten.expand.default:
        args = (args[0], list(node.meta["val"].shape))
    if node.target is aten.slice.Tensor and len(args) > 3 and isinstance(args[3], int):
        args = (*args[:3], min(args[3], args[0].meta["val"].shape[args[1]]), *args[4:])
    if not kwargs.get("pin_memory", True):
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    return args, kwargs


def _key(value: Any) -> Any:
    """Return a hashable stand-in for an op's arguments in which 1, 1.0 and True differ."""
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_key(item) for item in value))
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in sorted(value.items()))
    return (type(value).__name__, value) if isinstance(value, (bool, int, float)) else value
