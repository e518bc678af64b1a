"""Predict the bytes that are alive while a rank runs its lowered program, by walking it in the order of execution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from ..local_program import LocalProgram
from ..program import Input
from .memory import parameter_bytes
from .op_memory import Form
from .storages import LiveBytes, kernels_of
from .walk_graph import GraphWalk, Storage, Watch, numbers_of, own


def live_bytes(local: LocalProgram, optimizer: str = "adamw", watch: Watch | None = None) -> LiveBytes:
    """Return the bytes of one forward and backward on the rank of ``local`` when most of them are alive.

    Counted are parameters, buffers, constants, inputs and the optimizer's state, which lie there all the time; outputs,
    which the caller keeps until the backward has run; saved tensors until their last use; gradients; and everything in
    between: views share their base, a collective holds what it sends and what it receives. Gathered copies of
    parameters that the backward reads too stay until the end, for the next backward of the step.

    Args:
        local: the lowered program; any rank's, the first has the largest pieces.
        optimizer: whose state lies beside the parameters.
        watch: called after each op with the bytes that were alive at most while it ran.
    """
    walk = GraphWalk(kernels_of(local.mesh.device), watch)
    roles = [role for role in local.inputs if role.kind != "tangent"]
    values = [node.meta["val"] for node in _placeholders(local.forward)]
    resting = [resting_form(walk, role, value) for role, value in zip(roles, values, strict=True)]
    states = optimizer_states(walk, roles, values, optimizer)
    start = len(walk.account.events)
    outputs, saved = _forward(walk, local, roles, resting)
    kept = [saved[position] for position in kept_positions(local)]
    gradients = [] if local.backward is None else _backward(walk, local.backward, saved)
    found = walk.account.highest(start, walk.largest_gather_bytes)
    del states, outputs, kept, gradients  # held until here
    return found


def resting_form(walk: GraphWalk, role: Input, value: Tensor) -> Form:
    """Return a parameter, buffer or input that lies there before a step."""
    return walk.fresh(value, role.node, f"{role.kind}s")


def optimizer_states(
    walk: GraphWalk, roles: Sequence[Input], values: Sequence[Tensor], optimizer: str
) -> list[Storage]:
    """Return the optimizer's state of every trained parameter."""
    out = []
    for role, value in zip(roles, values, strict=True):
        if role.kind == "parameter" and role.requires_grad:
            shape, itemsize = tuple(value.shape), value.dtype.itemsize
            nbytes = parameter_bytes(math.prod(shape), itemsize, True, optimizer, shape).optimizer
            out.append(Storage(walk.account, nbytes, role.node, "optimizer"))
    return out


def _forward(
    walk: GraphWalk, local: LocalProgram, roles: Sequence[Input], resting: Sequence[Form]
) -> tuple[list[Any], list[Any]]:
    """Walk the forward as the executor runs it, on copies of the buffers that it updates; return outputs and saved."""
    updated = {role.of for role in local.outputs if role.kind == "buffer"}
    feeds = [walk.fresh(form.meta(), role.node) if role.node in updated else form for role, form in zip(roles, resting)]
    results = walk.run(local.forward, list(feeds))
    count = len(results) - local.num_saved
    returned = [role.kind for role in local.outputs if role.kind != "gradient" and role.node is not None]
    outputs = [form for form, kind in zip(results[:count], returned) if kind == "output"]
    saved = results[count:]
    walk.claim("saved", saved)
    walk.claim("outputs", outputs)
    return outputs, saved


def kept_positions(local: LocalProgram) -> list[int]:
    """Return which of the saved tensors are gathered copies of parameters: those are held until the next step."""
    (ends,) = local.forward.graph.output_node().args
    assert isinstance(ends, (tuple, list))
    names = {role.node for role in local.inputs}
    saved = ends[len(ends) - local.num_saved :]
    return [
        position
        for position, node in enumerate(saved)
        if isinstance(node, fx.Node) and node.op == "call_function" and node.meta.get("tensor") in names
    ]


def _backward(walk: GraphWalk, backward: fx.GraphModule, saved: list[Any]) -> list[Form | None]:
    """Walk the backward; the saved tensors are let go at their last use; return the gradients."""
    tangents = [walk.fresh(node.meta["val"], node.name) for node in _placeholders(backward)[len(saved) :]]
    arguments = [*saved, *tangents]
    taken = numbers_of(arguments)
    saved.clear()
    return own(walk, walk.run(backward, arguments), taken)


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]
