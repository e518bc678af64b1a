"""Let elementwise ops write into an operand that nobody reads any more, instead of into new memory.

New memory costs more than its bytes: on the host its pages are mapped one by one as they are first touched, and on any
device what is not there need not be kept free.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from .. import ops  # noqa: F401  (defines the ops named below)
from ..program import is_random
from .edits import Edit, Retarget
from .memories import Memories, may_be_view, schema_arguments
from .setting import Setting

_ATEN: Any = torch.ops.aten
_ALSO: dict[Any, Any] = {
    _ATEN.scatter_add.default: _ATEN.scatter_add_.default,
    torch.ops.autopar.normalise.default: torch.ops.autopar.normalise_.default,
    torch.ops.autopar.normalise_backward.default: torch.ops.autopar.normalise_backward_.default,
}
"""Not elementwise, but safe in their first operand."""


def write_in_place(joint: fx.GraphModule, setting: Setting) -> list[Edit]:
    """Return the ops that write into an operand.

    Safe where the operand is of the result's shape, dtype and strides on every rank, the program made its memory, and
    nothing that may lie in it is read behind the op, by another one, by a collective that is under way, by the
    backward, or as an output. An operand that may be a view is left alone: it may cover its memory twice. A backward
    may write into what the forward saved: whoever runs it twice gives it a copy (``written_arguments``).
    """
    memories = Memories(joint.graph, setting)
    edits: list[Edit] = []
    for node in joint.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or is_random(node):
            continue
        for slot, operand in enumerate(node.args):
            if isinstance(operand, fx.Node) and _can_take(node, operand, memories, setting):
                edit = _into(node, slot)
                if edit is not None:
                    edits.append(edit)
                    memories.join(operand, node)
                    break
    return edits


def _can_take(node: fx.Node, operand: fx.Node, memories: Memories, setting: Setting) -> bool:
    if operand.op != "call_function" or may_be_view(operand) or not _alike(node, operand):
        return False
    others = [other for other in node.all_input_nodes if other is not operand and memories.same(other, operand)]
    made_here = operand.meta.get("phase") == node.meta.get("phase")
    whole = bool(setting.outputs)  # a segment may run once a micro-batch, on what was saved once
    return (made_here or whole) and not others and memories.ends_at(operand, node)


def written_arguments(module: fx.GraphModule) -> tuple[int, ...]:
    """Return which arguments a lowered graph writes into, by position."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    written = {operand for node in module.graph.nodes for operand in written_operands(node)}
    return tuple(position for position, node in enumerate(placeholders) if node in written)


def written_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands that an op writes into."""
    if not isinstance(node.target, OpOverload):
        return []
    return [
        given
        for argument, given in schema_arguments(node)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(given, fx.Node)
    ]


def _alike(node: fx.Node, operand: fx.Node) -> bool:
    """Tell whether an operand is as the result on every rank: a dim of size 1 here may be of another size elsewhere."""
    result, given = node.meta.get("val"), operand.meta.get("val")
    if not isinstance(result, torch.Tensor) or not isinstance(given, torch.Tensor):
        return False
    if result.shape != given.shape or result.dtype != given.dtype:
        return False
    if not (result.is_contiguous() and given.is_contiguous()):
        return False
    return 1 not in result.shape or _has_layout_of(node, operand)


def _has_layout_of(node: fx.Node, operand: fx.Node) -> bool:
    layout = node.meta.get("layout")
    return layout is not None and layout == operand.meta.get("layout")


def _into(node: fx.Node, slot: int) -> Edit | None:
    """Return the change that lets an op write into the operand ``slot``, None where it has no such form."""
    if slot == 0:
        target = _in_place_form(node.target)
        if target is not None:
            return Retarget(node.name, target)
    found = _out_form(node.target)
    return None if found is None or node.kwargs.keys() & {found[1]} else Retarget(node.name, *found, slot)


@cache
def _in_place_form(op: OpOverload) -> OpOverload | None:
    """Return the form of an elementwise op that writes into its first operand."""
    if op in _ALSO:
        return _ALSO[op]  # type: ignore[no-any-return]
    if op.namespace != "aten" or torch.Tag.pointwise not in op.tags:
        return None
    packet = getattr(_ATEN, f"{op._schema.name.removeprefix('aten::')}_", None)
    form = getattr(packet, op._overloadname, None)
    if form is None or _takes(form, 0) != _takes(op, 0):
        return None
    return form  # type: ignore[no-any-return]


@cache
def _out_form(op: OpOverload) -> tuple[OpOverload, str] | None:
    """Return the form of an elementwise op that writes into a tensor that it is given, and that argument's name."""
    if op.namespace != "aten" or torch.Tag.pointwise not in op.tags:
        return None
    for name in op.overloadpacket.overloads():
        form = getattr(op.overloadpacket, name)
        outs = [argument for argument in form._schema.arguments if argument.is_out]
        if len(outs) != 1 or _takes(form, 1) != _takes(op, 0):
            continue
        # Without a kernel of its own it would compute into new memory and copy.
        if form.has_kernel_for_dispatch_key(torch._C.DispatchKey.CPU):
            return form, outs[0].name
    return None


def _takes(op: OpOverload, last: int) -> list[tuple[str, str]]:
    """Return names and types of an op's arguments but for the last ones."""
    arguments = op._schema.arguments
    return [(argument.name, str(argument.type)) for argument in arguments[: len(arguments) - last]]
