"""Walk a lowered graph in the order in which it runs, on forms of its tensors, keeping account of their storages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..collective_calls import WAIT, Call, collective_calls
from ..flatten_buckets import flattened
from ..program import is_getitem
from .op_memory import Form, OpMemories
from .storages import Account, Kernels

Watch = Callable[[fx.Node, int], None]


class Storage:
    """Bytes of an account, alive as long as a form that lies in them is: as with tensors, who holds it decides."""

    __slots__ = ("account", "nbytes", "number")

    def __init__(self, account: Account, nbytes: int, where: str, kind: str | None = None) -> None:
        self.account, self.nbytes = account, nbytes
        self.number = account.open(nbytes, where, kind)

    def __del__(self) -> None:
        self.account.add(self.number, -self.nbytes, "")


class GraphWalk:
    """Walks graphs and keeps one account of all of them.

    Args:
        watch: called after each op with the bytes that were alive at most while it ran.

    Attributes:
        account: of every storage.
        largest_gather_bytes: the largest result of a single gather so far.
    """

    def __init__(self, kernels: Kernels, watch: Watch | None = None) -> None:
        self.account = Account()
        self._watch = watch
        self._held: dict[int, Form] = {}
        self.largest_gather_bytes = 0
        self._memories = OpMemories(kernels)
        self._constants: dict[str, Form] = {}
        self._flat: dict[fx.GraphModule, fx.GraphModule] = {}

    def fresh(self, value: torch.Tensor, where: str, kind: str | None = None) -> Form:
        """Return a new contiguous tensor of the shape and dtype of ``value``."""
        meta = torch.empty(tuple(value.shape), dtype=value.dtype, device="meta")
        return Form(tuple(value.shape), meta.stride(), value.dtype, Storage(self.account, meta.nbytes, where, kind))

    def new(self, value: torch.Tensor, where: str) -> Form:
        """Return a new tensor that lies in memory as ``value`` would."""
        return Form(tuple(value.shape), value.stride(), value.dtype, Storage(self.account, value.nbytes, where))

    def claim(self, kind: str, values: Any) -> None:
        """Say what the storages of values are for, where nothing is said yet."""
        for form in forms_of(values):
            self.account.kinds.setdefault(form.storage.number, kind)

    def run(self, module: fx.GraphModule, arguments: list[Any]) -> list[Any]:
        """Walk one graph; the list of arguments is emptied, and each is let go at its last use."""
        if module not in self._flat:  # a segment is walked once a micro-batch
            self._flat[module] = flattened(module)
        module = self._flat[module]
        env: dict[fx.Node, Any] = {}
        stream = iter(list(arguments))
        arguments.clear()
        uses = last_uses(module.graph)
        nodes = list(module.graph.nodes)
        for node in nodes:
            if node.op == "placeholder":
                env[node] = next(stream)
        del stream
        for node in nodes:
            if node.op == "output":
                return [fx.node.map_arg(end, env.__getitem__) for end in node.args[0]]
            if node.op != "placeholder":
                env[node] = self._watched(node, env)
            for gone in uses[node]:
                del env[gone]
        raise AssertionError("the graph has no output")

    def _watched(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        if self._watch is None:
            return self._value(node, env)
        live, start = self.account.live_bytes, len(self.account.events)
        value = self._value(node, env)
        highest = live
        for _, nbytes, _ in self.account.events[start:]:
            live += nbytes
            highest = max(highest, live)
        self._watch(node, highest)
        return value

    def _value(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        if node.op == "get_attr":
            return self._constant(str(node.target), node)
        given: Any = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        args, kwargs = given
        if is_getitem(node):
            return args[0][args[1]]
        if node.target is WAIT:
            self._held.pop(args[0].storage.number, None)
            return args[0]
        calls = collective_calls(node)
        if not calls:
            return self._computed(node, args, dict(kwargs))
        (call,) = calls
        return self._sent(node, call, args[0])

    def _sent(self, node: fx.Node, call: Call, operand: Form) -> Form:
        """Return the result of a collective; what it hands in is alive until the wait."""
        if call.kind == "all_gather":
            self.largest_gather_bytes = max(self.largest_gather_bytes, call.value.nbytes)
        result = operand if call.in_place else self.fresh(call.value, node.name)
        if call.holds_operand:
            self._held[result.storage.number] = operand
        return result

    def _constant(self, target: str, node: fx.Node) -> Any:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return None
        if target not in self._constants:
            self._constants[target] = self.fresh(value, node.name, "buffers")
        return self._constants[target]

    def _computed(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target: Any = node.target
        found = self._memories.of(target, args, kwargs, node.meta.get("val"))
        given = forms_of((args, kwargs))
        workspace = Storage(self.account, found.workspace_bytes, node.name) if found.workspace_bytes else None
        new: dict[int, Storage] = {}
        forms: list[Form | None] = []
        for result in found.results:
            if result is None:
                forms.append(None)
                continue
            start = result.start
            if result.source >= 0:
                storage = given[result.source].storage
                start += given[result.source].start
            else:
                if result.fresh not in new:
                    new[result.fresh] = Storage(self.account, result.nbytes, node.name)
                storage = new[result.fresh]
            forms.append(Form(result.shape, result.stride, result.dtype, storage, start))
        del workspace
        return forms[0] if found.single else tuple(forms)


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return for every node the values that its code lets go: those read there last, itself if nobody reads it."""
    seen: set[fx.Node] = set()
    out: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        gone = [source for source in node.all_input_nodes if source not in seen]
        seen.update(gone)
        if not node.users and node.op not in ("placeholder", "output"):
            gone.append(node)
        out[node] = gone if node.op != "output" else []
    return out


def numbers_of(values: Any) -> set[int]:
    """Return the numbers of the storages of values, which does not hold them."""
    return {form.storage.number for form in forms_of(values)}


def own(walk: GraphWalk, values: list[Any], taken: set[int]) -> list[Form | None]:
    """Return gradients as they are handed over: contiguous, none in the memory of another or of ``taken`` storages.

    The list of values is emptied, so that what is copied goes.
    """
    out: list[Form | None] = []
    spans: dict[int, list[tuple[int, int]]] = {number: [(0, sys.maxsize)] for number in taken}
    for position, form in enumerate(values):
        values[position] = None
        if form is not None:
            start, end = form.start, form.start + form.meta().nbytes
            met = any(start < b and a < end for a, b in spans.get(form.storage.number, ()))
            if met or not form.meta().is_contiguous():
                form = walk.fresh(form.meta(), "the gradients", "gradients")
                start, end = 0, sys.maxsize
            spans.setdefault(form.storage.number, []).append((start, end))
            walk.claim("gradients", form)
        out.append(form)
    values.clear()
    return out


def forms_of(value: Any) -> list[Form]:
    """Return the forms among nested values."""
    return [leaf for leaf in pytree.tree_leaves(value, is_leaf=_is_form) if isinstance(leaf, Form)]


def _is_form(leaf: Any) -> bool:
    return isinstance(leaf, Form)
