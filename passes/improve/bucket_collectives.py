"""Run small collectives of one kind, axis and dtype as one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import fx

from ..collective_calls import COALESCED
from ..cost.collectives import coalesced_seconds
from ..program import ancestors
from .edits import Coalesce, Edit, apply_edits
from .headroom import headroom
from .setting import Setting
from .sort_nodes import Key, sort_nodes
from .transfers import Transfer, phase_spans, transfers

_CAN = frozenset(COALESCED.values())


def bucket_collectives(joint: fx.GraphModule, setting: Setting) -> list[Edit]:
    """Return the buckets: collectives that run as one, behind the last of their operands, before the first use.

    A bucket grows while it saves at least what it may delay: whoever uses a result first waits for the bytes of all,
    and what was ready first starts late. So it ends where the bytes take as long as the start of a collective, by the
    cost model, or later on a device whose transfers slow down the compute that would hide them. Where several start and
    end together nothing is delayed. What nobody waits for before the end of the phase (gradients) goes in even buckets:
    only the last of them is exposed.

    Safe always: what moves, and which numbers meet, stays the same.
    """
    buckets = [bucket for bucket in _find(joint, setting) if len(bucket.members) > 1]
    if not buckets:
        return []
    edits: list[Edit] = [Coalesce(tuple(member.node.name for member in bucket.members)) for bucket in buckets]
    keys: dict[fx.Node, Key] = {}
    for bucket in buckets:
        keys.update(bucket.keys())
    # The order is found where the new calls are there: on a copy.
    graph = fx.Graph()
    graph.output(graph.graph_copy(joint.graph, {}))
    by_name: dict[str, Key] = {node.name: key for node, key in keys.items()}
    apply_edits([graph], edits)
    return [*edits, *sort_nodes(graph, _new_keys(graph, joint.graph, by_name))]


@dataclass
class _Bucket:
    """Collectives that run as one."""

    members: list[Transfer] = field(default_factory=list)

    @property
    def ready(self) -> int:
        return max(member.ready for member in self.members)

    @property
    def first_use(self) -> int:
        return min(member.first_use for member in self.members)

    @property
    def anchor(self) -> int:
        """Where it runs: as late as its first member did, but behind all operands."""
        return max(self.ready, min(member.issued for member in self.members))

    def seconds(self, setting: Setting) -> float:
        first = self.members[0].calls[0]
        sizes = [float(member.calls[0].bytes_in) for member in self.members]
        ranks, link = setting.group(first.axes)
        return coalesced_seconds(first.kind, ranks, sizes, link, setting.device)

    def takes(self, other: Transfer, room: np.ndarray[Any, Any], setting: Setting) -> bool:
        """Tell whether another collective belongs into the bucket."""
        grown = _Bucket([*self.members, other])
        if grown.anchor > grown.first_use:
            return False
        mine, alone, together = self.seconds(setting), _Bucket([other]).seconds(setting), grown.seconds(setting)
        delayed = 0.0
        if other.first_use != self.first_use:
            delayed += together - (mine if other.first_use > self.first_use else alone)
        if other.ready != self.ready:
            delayed += together - (alone if other.ready > self.ready else mine)
        delayed *= 1.0 - setting.device.contention
        saved = mine + alone - together
        return saved > 0 and saved >= delayed and grown.fits(room)

    def fits(self, room: np.ndarray[Any, Any]) -> bool:
        """Tell whether what comes early, and what is kept for longer, is within the budget."""
        extra = np.zeros_like(room)
        for member in self.members:
            if self.anchor < member.issued:
                extra[self.anchor : member.issued] += member.result_bytes
            else:
                extra[member.issued : self.anchor] += sum(call.bytes_in for call in member.calls)
        if len(self.members) > 1:  # the buffer beside what is copied into it, and out of it
            extra[self.anchor] += sum(call.bytes_in for member in self.members for call in member.calls)
            if self.members[0].calls[0].kind == "all_gather":
                last = max(member.first_use for member in self.members)
                extra[self.anchor : last + 1] += sum(member.result_bytes for member in self.members)
        return bool((extra <= room).all())

    def keys(self) -> Iterator[tuple[fx.Node, Key]]:
        """Yield the place of every node that moves."""
        for member in self.members:
            for node in member.before:
                yield node, (self.anchor - 0.6,)
            yield member.node, (self.anchor - 0.5,)
            for node in member.after:
                yield node, (max(self.anchor - 0.4, member.issued),)


def _find(joint: fx.GraphModule, setting: Setting) -> list[_Bucket]:
    room = headroom(joint, setting)
    kept = _kept_calls(joint.graph, setting)
    ends = {end for _, end in phase_spans(list(joint.graph.nodes)).values()}
    groups: dict[Any, list[Transfer]] = defaultdict(list)
    for transfer in sorted(_candidates(joint.graph), key=lambda each: (each.ready, each.first_use, each.issued)):
        call = transfer.calls[0]
        dtype = call.operand.meta["val"].dtype
        alike = (call.op, call.arguments, dtype, transfer.node.meta["phase"], transfer.node in kept)
        groups[*map(str, alike), transfer.first_use in ends].append(transfer)
    out: list[_Bucket] = []
    for (*_, waited_by_nobody), members in groups.items():
        target = _even_seconds(members, setting) if waited_by_nobody else 0.0
        current = _Bucket([members[0]])
        for transfer in members[1:]:
            if waited_by_nobody:
                takes = current.seconds(setting) < target and _Bucket([*current.members, transfer]).fits(room)
            else:
                takes = current.takes(transfer, room, setting)
            if takes:
                current.members.append(transfer)
            else:
                out.append(current)
                current = _Bucket([transfer])
        out.append(current)
    return out


def _even_seconds(members: list[Transfer], setting: Setting) -> float:
    """Return how long each bucket of transfers should take that nobody waits for before the end of the phase.

    Of ``n`` even buckets the last is exposed, the others hide and cost their ``contention``. With ``s`` seconds to
    start one and ``b`` for all bytes, that is least for ``n = sqrt((1 - contention) b / (contention s))``.
    """
    whole = _Bucket(members).seconds(setting)
    call = members[0].calls[0]
    ranks, link = setting.group(call.axes)
    start = float(coalesced_seconds(call.kind, ranks, [0.0], link, setting.device))
    contention = setting.device.contention
    number = max(1.0, math.sqrt((1.0 - contention) * max(whole - start, 0.0) / (contention * start)))
    return start + (whole - start) / number if number > 1.0 else math.inf


def _candidates(graph: fx.Graph) -> Iterator[Transfer]:
    """Yield what may share a bucket. What follows another collective never comes earlier: that one may come later."""
    for transfer in transfers(graph):
        if len(transfer.calls) == 1 and transfer.calls[0].op in _CAN:
            yield replace(transfer, ready=transfer.issued) if transfer.follows else transfer


def _kept_calls(graph: fx.Graph, setting: Setting) -> set[fx.Node]:
    """Return the calls that gather kept copies of parameters, which the runtime runs apart."""
    return ancestors(n for n in graph.nodes if (n.meta.get("tensor"), n.meta.get("layout")) in setting.kept)


def _new_keys(graph: fx.Graph, old: fx.Graph, keys: dict[str, Key]) -> dict[fx.Node, Key]:
    """Return the keys of the nodes of a graph in which calls have been put together; others keep their old position."""
    position = {node.name: index for index, node in enumerate(old.nodes)}
    names = {node: node.name if node.name in position else node.meta["replaces"] for node in graph.nodes}
    return {node: keys.get(name, (position[name],)) for node, name in names.items()}
