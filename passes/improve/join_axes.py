"""Run all-reduces of one tensor on several axes, one after the other, as one on the group of all of them."""

from __future__ import annotations

import torch
from torch import fx

from ..collective_calls import WAIT, Call, collective_calls
from ..cost.collectives import all_reduce_seconds
from .edits import Edit, Join
from .setting import Setting

_CONTIGUOUS = torch.ops.aten.contiguous.default


def join_axes(joint: fx.GraphModule, setting: Setting) -> list[Edit]:
    """Return the all-reduces that become one: of one tensor and op, with nothing in between that anybody else reads.

    A gradient of data parallelism on two axes is one. One collective moves fewer bytes and pays one start, but
    one ring over ranks of several nodes can be slower than a ring inside and one between them: then they stay two.

    Safe where ``val`` is right: ranks that reduce along each of the axes hand in one shape, so all of the group do. The
    order in which a sum adds is that of the backend, as for any group.
    """
    edits: list[Edit] = []
    wider: dict[fx.Node, tuple[fx.Node, tuple[int, ...]]] = {}
    for node in joint.graph.nodes:
        found = _earlier(node)
        if found is None:
            continue
        before, between = found
        first, axes = wider.get(before, (before, collective_calls(before)[0].axes))
        (call,) = collective_calls(node)
        if set(call.axes) & set(axes) or not _is_cheaper(call, axes, setting):
            continue
        edits.append(Join(first.name, tuple(part.name for part in between), node.name))
        wider[node] = first, (*axes, *call.axes)
    return edits


def _earlier(node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """Return the all-reduce that a node takes up alone, and what leads from its wait to the node; None without one."""
    call = _sum(node)
    if call is None:
        return None
    between = [call.operand] if call.operand.target is _CONTIGUOUS else []
    wait = between[0].args[0] if between else call.operand
    if not isinstance(wait, fx.Node) or wait.target is not WAIT:
        return None
    before = wait.args[0]
    if not isinstance(before, fx.Node):
        return None
    other = _sum(before)
    alone = all(len(part.users) == 1 for part in (wait, *between, before))
    if other is None or not alone or [user.target for user in node.users] != [WAIT]:
        return None
    alike = all(node.meta.get(key) == before.meta.get(key) for key in ("phase", "origin", "again"))
    same = call.arguments[:-1] == other.arguments[:-1] and _form(call) == _form(other)
    return (before, tuple(between)) if alike and same else None


def _sum(node: fx.Node) -> Call | None:
    """Return the one all-reduce of a node, None of any other."""
    calls = collective_calls(node)
    return calls[0] if len(calls) == 1 and calls[0].kind == "all_reduce" and not calls[0].in_place else None


def _form(call: Call) -> tuple[torch.Size, torch.dtype]:
    value: torch.Tensor = call.operand.meta["val"]
    return value.shape, value.dtype


def _is_cheaper(call: Call, axes: tuple[int, ...], setting: Setting) -> bool:
    """Tell whether an all-reduce on the axes of both takes no longer than one on ``axes`` and then that of ``call``."""
    if setting.joined((*axes, *call.axes)) is None:
        return False

    def seconds(along: tuple[int, ...]) -> float:
        ranks, link = setting.group(along)
        return float(all_reduce_seconds(ranks, float(call.bytes_in), link, setting.device)) + link.meet_s

    return seconds((*axes, *call.axes)) <= seconds(axes) + seconds(call.axes)
