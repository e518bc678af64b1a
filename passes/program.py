"""The program: a joint forward and backward FX graph with its roles.

Invariants that every pass keeps (``check_program`` asserts them):

- every placeholder has one ``Input``, every element of the output node's flat list one ``Output``, in order;
- every node but the output has ``meta["val"]`` (a fake or meta tensor, a tuple of them, or a scalar),
  ``meta["phase"]`` (``"forward"`` or ``"backward"``), ``meta["module"]`` (module path, may be empty),
  ``meta["source"]`` (``file:line: code`` of the user, may be empty);
- a backward node may have ``meta["forward_node"]``, the name of the forward node it belongs to;
- a node with several results is read through ``operator.getitem`` alone;
- nothing mutates: no in-place op, no alias that is written to. Random ops run in node order.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.errors import AutoparError

InputKind = Literal["parameter", "buffer", "input", "tangent"]
OutputKind = Literal["output", "gradient", "buffer"]


@dataclass(frozen=True)
class Input:
    """The role of one placeholder.

    Attributes:
        node: the placeholder's name.
        kind: what it carries.
        name: the parameter's or buffer's full name, the input's path (``args[0]``, ``kwargs['labels']``),
            or the output's path for a tangent.
        index: the input's flat position in ``(args, kwargs)``, the output's flat position for a tangent, else -1.
        requires_grad: the program returns a gradient for it.
        aliases: further full names of the same tensor (tied parameters).
    """

    node: str
    kind: InputKind
    name: str
    index: int = -1
    requires_grad: bool = False
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Output:
    """The role of one element of the output list.

    Attributes:
        kind: an output leaf of the module, the gradient of an input, or the new value of a buffer (or of an input that
            the model writes to).
        name: the leaf's path (``['loss']``, ``[0]``), or the full name or path of what ``of`` carries.
        node: the name of the node that computes it; None for a constant leaf or a gradient that does not exist.
        index: the leaf's flat position for an output.
        of: the placeholder whose gradient or new value this is.
        constant: the value of a leaf that is no tensor.
        differentiable: of an output, whether autograd computes it from what wants a gradient. No part of what a plan
            depends on.
    """

    kind: OutputKind
    name: str
    node: str | None
    index: int = -1
    of: str = ""
    constant: Any = None
    differentiable: bool = field(default=False, repr=False)


@dataclass
class Program:
    """A joint graph with its roles; global shapes before lowering.

    Attributes:
        graph_module: the graph; its output node returns one flat tuple.
        inputs: one role a placeholder, in order: parameters, buffers, inputs, tangents.
        outputs: one role an element of the output tuple: leaves, gradients, new buffer values.
        in_spec: pytree spec of ``(args, kwargs)``; tensors and non-tensors alike are leaves.
        out_spec: pytree spec of what the module returns.
        constant_inputs: flat position -> value of input leaves that are no tensors (burnt into the graph).
        loss: flat position of the scalar loss among the output leaves, or None. Outputs beside it have tangents only if
            every output was asked to be differentiated.
        training: the module was in training mode and the graph has a backward.
        micro_batches: how many times the part of it that depends on the input ``micro_batch`` runs; 1 without one.
    """

    graph_module: fx.GraphModule
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    constant_inputs: dict[int, Any] = field(default_factory=dict)
    loss: int | None = None
    training: bool = True
    micro_batches: int = 1

    @property
    def graph(self) -> fx.Graph:
        """The FX graph."""
        return self.graph_module.graph

    def nodes(self) -> dict[str, fx.Node]:
        """Return the nodes by name."""
        return {node.name: node for node in self.graph.nodes}

    def ops(self) -> Iterator[fx.Node]:
        """Yield the op nodes in order: neither placeholders, nor ``getitem``, nor the output."""
        for node in self.graph.nodes:
            if node.op in ("call_function", "get_attr") and node.target is not operator.getitem:
                yield node

    def input_of(self, node: str) -> Input:
        """Return the role of the placeholder called ``node``."""
        return next(role for role in self.inputs if role.node == node)

    def fingerprint(self) -> str:
        """Return a digest of everything a plan depends on: ops, arguments, shapes, dtypes, roles."""
        digest = hashlib.sha256()
        for line in _describe(self):
            digest.update(line.encode())
            digest.update(b"\n")
        return digest.hexdigest()


def _describe(program: Program) -> Iterator[str]:
    for node in program.graph.nodes:
        vals = ";".join(f"{list(t.shape)}{t.dtype}" for t in tensors_of(node))
        args = f"{node.args} {sorted(node.kwargs.items())}"
        yield f"{node.name} {node.op} {node.target} {args} {vals} {node.meta.get('phase')}"
    for role in program.inputs:
        yield repr(role)
    for result in program.outputs:
        plain = isinstance(result.constant, (int, float, complex, str, bytes, type(None)))
        # Other objects may show their address, which differs from process to process.
        yield repr(result if plain else replace(result, constant=type(result.constant).__qualname__))


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """Return the tensors that a node computes: one, or one a result; none for a scalar."""
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        return [val]
    if isinstance(val, (tuple, list)):
        return [item for item in val if isinstance(item, torch.Tensor)]
    return []


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """Return the tensor operands of an op in argument order, repeated where the op reads one twice.

    This is the order that ``Rule.operands`` follows. Lists of tensors (``cat``) are flattened.
    """
    return [
        leaf
        for leaf in pytree.arg_tree_leaves(*node.args, **node.kwargs)
        if isinstance(leaf, fx.Node) and isinstance(leaf.meta.get("val"), torch.Tensor)
    ]


def result_values(node: fx.Node) -> list[tuple[int, torch.Tensor]]:
    """Return ``(result index, tensor)`` for every tensor result; a single result has index 0.

    This is the order that ``Rule.results`` follows (positions that are None are left out).
    """
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        return [(0, val)]
    if isinstance(val, (tuple, list)):
        return [(i, item) for i, item in enumerate(val) if isinstance(item, torch.Tensor)]
    return []


def has_many_results(node: fx.Node) -> bool:
    """Tell whether an op returns a tuple that ``getitem`` takes apart."""
    return isinstance(node.meta.get("val"), (tuple, list))


def is_getitem(node: fx.Node) -> bool:
    """Tell whether a node takes one result out of an op's tuple."""
    return node.op == "call_function" and node.target is operator.getitem


def check_program(program: Program) -> Program:
    """Assert the invariants of a program; same program back.

    Raises:
        AutoparError: the first invariant that does not hold, and the node that breaks it.
    """
    for fault in _faults(program):
        raise AutoparError(f"the program breaks an invariant: {fault}")
    return program


def _faults(program: Program) -> Iterator[str]:
    nodes = list(program.graph.nodes)
    placeholders = [node.name for node in nodes if node.op == "placeholder"]
    if placeholders != [role.node for role in program.inputs]:
        yield f"placeholders {placeholders} do not match the inputs {[role.node for role in program.inputs]}"
    results = nodes[-1].args[0]
    names = [node.name if isinstance(node, fx.Node) else None for node in results]
    if names != [role.node for role in program.outputs]:
        yield f"the graph returns {names}, the outputs are {[role.node for role in program.outputs]}"
    known = {node.name for node in nodes}
    for role, result in zip(program.outputs, results):
        if role.kind != "gradient" and isinstance(result, fx.Node) and result.meta.get("phase") == "backward":
            yield f"the {role.kind} {role.name} is computed by {result.name}, which is in the backward"
    for role in program.outputs:
        if role.kind != "output" and role.of not in placeholders:
            yield f"the output {role.name} belongs to {role.of!r}, which is no placeholder"
    for node in nodes[:-1]:
        if "val" not in node.meta:
            yield f"{node.name} has no val"
        if node.meta.get("phase") not in ("forward", "backward"):
            yield f"{node.name} is in the phase {node.meta.get('phase')!r}"
        if not all(isinstance(node.meta.get(field), str) for field in ("module", "source")):
            yield f"{node.name} lacks its module or source"
        if node.meta.get("forward_node", node.name) not in known:
            yield f"{node.name} belongs to {node.meta['forward_node']}, which does not exist"
        if has_many_results(node) and not all(is_getitem(user) for user in node.users):
            yield f"{node.name} has several results, but is read by more than getitem"
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            yield f"{node.name} writes into its operand"
        if node.meta.get("phase") == "forward" and any(n.meta.get("phase") == "backward" for n in node.all_input_nodes):
            yield f"{node.name} is in the forward, but needs the backward"


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes and all that they are computed from."""
    seen: set[fx.Node] = set()
    queue = list(nodes)
    while queue:
        node = queue.pop()
        if node not in seen:
            seen.add(node)
            queue += node.all_input_nodes
    return seen


def outputs_behind_gradients(program: Program) -> dict[str, frozenset[int]]:
    """Return, by the placeholder whose gradient it is, the outputs (flat positions) that each gradient comes from.

    Where none of them gets a gradient, one device has None there, not zeros.
    """
    behind: dict[fx.Node, frozenset[int]] = {}
    tangents = {role.node: role.index for role in program.inputs if role.kind == "tangent"}
    for node in program.graph.nodes:
        own = frozenset({tangents[node.name]}) if node.name in tangents else frozenset[int]()
        behind[node] = own.union(*(behind[source] for source in node.all_input_nodes))
    nodes = program.nodes()
    return {role.of: behind[nodes[role.node]] for role in program.outputs if role.kind == "gradient" and role.node}


def is_random(node: fx.Node) -> bool:
    """Tell whether an op draws random numbers from the default generator."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def touches_generator(node: fx.Node) -> bool:
    """Tell whether an op draws random numbers, or reads or sets the generator's state."""
    return is_random(node) or str(node.target) in _STATES


_STATES = frozenset({"autopar.random_state.default", "autopar.set_random_state.default"})
