"""Predict the bytes that are alive while a rank runs its lowered program, by walking it in the order of execution."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..insert_collectives import COLLECTIVES
from ..local_program import LocalProgram
from ..program import is_getitem
from .memory import parameter_bytes
from .op_memory import Form, OpMemories
from .storages import Account, LiveBytes, kernels_of

_WAIT: Any = torch.ops._c10d_functional.wait_tensor.default


def live_bytes(local: LocalProgram, optimizer: str = "adamw") -> LiveBytes:
    """Return the bytes of one forward and backward on the rank of ``local`` when most of them are alive.

    Counted are parameters, buffers, constants, inputs and the optimizer's state, which lie there all the time; outputs,
    which the caller keeps until the backward has run; saved tensors until their last use; gradients; and everything in
    between: views share their base, a collective holds what it sends and what it receives.

    Args:
        local: the lowered program; any rank's, the first has the largest pieces.
        optimizer: whose state lies beside the parameters.
    """
    return _Walk(local, optimizer).run()


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


class _Walk:
    """The values that are alive, and the storages that they lie in."""

    def __init__(self, local: LocalProgram, optimizer: str) -> None:
        self.local, self.optimizer = local, optimizer
        self.memories = OpMemories(kernels_of(local.mesh.device))
        self.account = Account()
        self.holders: Counter[int] = Counter()
        self.nbytes: dict[int, int] = {}
        self.constants: dict[str, Form] = {}
        self.largest_gather_bytes = 0

    def run(self) -> LiveBytes:
        """Walk the forward, then the backward, then hand over the gradients."""
        local = self.local
        roles = [role for role in local.inputs if role.kind != "tangent"]
        updated = {role.of for role in local.outputs if role.kind == "buffer"}
        feeds: list[Any] = []
        clones: list[Form] = []
        for role, node in zip(roles, _placeholders(local.forward)):
            form = self.resident(node.meta["val"], f"{role.kind}s", role.node)
            if role.node in updated:
                form = self.fresh(form.shape, form.dtype, "temporaries", role.node)
                self.hold(form)  # the executor keeps its copy of a buffer until the forward has run
                clones.append(form)
            feeds.append(form)
            if role.kind == "parameter" and role.requires_grad:
                self.account.add(-1 - len(feeds), self.state_bytes(form), role.node)
                self.account.kinds[-1 - len(feeds)] = "optimizer"
        start = len(self.account.events)
        results = self.half(local.forward, feeds)
        saved = results[len(results) - local.num_saved :]
        outputs = results[: len(results) - local.num_saved]
        returned = [role.kind for role in local.outputs if role.kind != "gradient" and role.node is not None]
        self.claim("saved", saved)
        self.claim("outputs", [form for form, kind in zip(outputs, returned) if kind == "output"])
        self.drop(clones)
        self.drop([form for form, kind in zip(outputs, returned) if kind == "buffer"])
        if local.backward is not None:
            tangents = _placeholders(local.backward)[local.num_saved :]
            given = [self.fresh(t.meta["val"].shape, t.meta["val"].dtype, "temporaries", t.name) for t in tangents]
            for form in given:
                self.hold(form)
            self.gradients(self.half(local.backward, [*saved, *given]), [*saved, *given])
        return self.account.highest(start, self.largest_gather_bytes)

    def state_bytes(self, form: Form) -> int:
        numel = math.prod(form.shape)
        return parameter_bytes(numel, form.dtype.itemsize, True, self.optimizer, form.shape).optimizer

    def resident(self, value: torch.Tensor, kind: str, where: str) -> Form:
        """Return a tensor that is there all the time."""
        form = self.fresh(tuple(value.shape), value.dtype, kind, where)
        self.hold(form)
        return form

    def fresh(self, shape: Sequence[int], dtype: torch.dtype, kind: str | None, where: str) -> Form:
        """Return a new contiguous tensor, held once."""
        meta = torch.empty(tuple(shape), dtype=dtype, device="meta")
        return Form(tuple(shape), meta.stride(), dtype, self.allocate(meta.nbytes, where, kind))

    def allocate(self, nbytes: int, where: str, kind: str | None = None) -> int:
        number = len(self.nbytes)
        self.nbytes[number] = nbytes
        self.account.add(number, nbytes, where)
        self.holders[number] += 1
        if kind is not None:
            self.account.kinds[number] = kind
        return number

    def hold(self, form: Form) -> None:
        self.holders[form.storage] += 1

    def drop(self, value: Any) -> None:
        """Let go of the tensors of a value; a storage that nobody holds is freed."""
        for form in _forms(value):
            self.holders[form.storage] -= 1
            if not self.holders[form.storage]:
                self.account.add(form.storage, -self.nbytes[form.storage], "")

    def claim(self, kind: str, values: Sequence[Any]) -> None:
        """Say what the storages of values are for, where nothing is said yet."""
        for form in _forms(values):
            self.account.kinds.setdefault(form.storage, kind)

    def half(self, module: fx.GraphModule, feeds: Sequence[Any]) -> list[Any]:
        """Walk one half; the feeds are let go at their last use, the results are held."""
        env: dict[fx.Node, Any] = {}
        stream = iter(feeds)
        uses = last_uses(module.graph)
        for node in module.graph.nodes:
            if node.op == "output":
                results = [fx.node.map_arg(end, env.__getitem__) for end in node.args[0]]
                for form in _forms(results):
                    self.hold(form)
                for value in env.values():
                    self.drop(value)
                return results
            env[node] = next(stream) if node.op == "placeholder" else self.value(module, node, env)
            for gone in uses[node]:
                self.drop(env.pop(gone))
        raise AssertionError("the graph has no output")

    def value(self, module: fx.GraphModule, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        """Return what a node computes, held once for each of its tensors."""
        if node.op == "get_attr":
            return self.constant(str(node.target), node)
        given: Any = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        args, kwargs = given
        if is_getitem(node):
            found = args[0][args[1]]
        elif node.target is _WAIT:
            found = args[0]
        elif node.target in COLLECTIVES:
            value = node.meta["val"]
            if COLLECTIVES[node.target] == "all_gather":
                self.largest_gather_bytes = max(self.largest_gather_bytes, value.nbytes)
            return self.fresh(value.shape, value.dtype, None, node.name)
        else:
            return self.computed(node, args, dict(kwargs))
        for form in _forms(found):
            self.hold(form)
        return found

    def constant(self, target: str, node: fx.Node) -> Any:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return None
        if target not in self.constants:
            self.constants[target] = self.resident(value, "buffers", node.name)
        self.hold(self.constants[target])
        return self.constants[target]

    def computed(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target: Any = node.target
        found = self.memories.of(target, args, kwargs, node.meta.get("val"))
        given = _forms((args, kwargs))
        if found.workspace_bytes:
            self.account.add(-1, found.workspace_bytes, node.name)
        new: dict[int, int] = {}
        forms: list[Form | None] = []
        for result in found.results:
            if result is None:
                forms.append(None)
                continue
            if result.source >= 0:
                storage = given[result.source].storage
                self.holders[storage] += 1
            elif result.fresh in new:
                storage = new[result.fresh]
                self.holders[storage] += 1
            else:
                storage = new[result.fresh] = self.allocate(result.nbytes, node.name)
            forms.append(Form(result.shape, result.stride, result.dtype, storage))
        if found.workspace_bytes:
            self.account.add(-1, -found.workspace_bytes, "")
        return forms[0] if found.single else tuple(forms)

    def gradients(self, values: list[Any], given: Sequence[Any]) -> None:
        """Hand over the gradients: contiguous, and none in the memory of another or of a tensor given before."""
        taken = {form.storage for form in _forms(given)}
        for value in values:
            for form in _forms(value):
                meta = form.meta()
                owned = form
                if form.storage in taken or not meta.is_contiguous():
                    owned = self.fresh(form.shape, form.dtype, "gradients", "the gradients")
                    self.drop(form)
                taken.add(owned.storage)
                self.account.kinds.setdefault(owned.storage, "gradients")


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _forms(value: Any) -> list[Form]:
    return [leaf for leaf in pytree.tree_leaves(value, is_leaf=_is_form) if isinstance(leaf, Form)]


def _is_form(leaf: Any) -> bool:
    return isinstance(leaf, Form)
