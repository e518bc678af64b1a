"""Ops of the micro-batch: the cut and the joined dim are not split, sums over micro-batches pass partial sums on."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.passes import ops as _ops  # noqa: F401  (defines torch.ops.autopar)
from autopar.passes.rules.form import arguments, blocked, emit_with, letters, linear_groups, make_rule, shape_of
from autopar.passes.rules.rule import LocalCall, Rule
from autopar.passes.rules.table import rule

MICRO_BATCH: Any = torch.ops.autopar.micro_batch.default
BERNOULLI_PART: Any = torch.ops.autopar.bernoulli_part.default
OVER: Any = torch.ops.autopar.over_micro_batches.default
JOIN: Any = torch.ops.autopar.join_micro_batches.default


@rule(MICRO_BATCH)
def micro_batch(node: fx.Node) -> Rule:
    """The part of a tensor that belongs to the micro-batch: the other dims are parallel."""
    names = blocked(letters(len(shape_of(node))), int(arguments(node)["dim"]))
    return make_rule(node, [names, []], [names], linear=linear_groups(node, (0,)))


@rule(JOIN)
def join_micro_batches(node: fx.Node) -> Rule:
    """The results of all micro-batches side by side: the other dims are parallel."""
    names = blocked(letters(len(shape_of(node))), int(arguments(node)["dim"]))
    return make_rule(node, [names], [names], linear=linear_groups(node, (0,)))


@rule(OVER)
def over_micro_batches(node: fx.Node) -> Rule:
    """A reduction over the micro-batches: every dim is parallel, a partial value of the same kind passes."""
    names, op = letters(len(shape_of(node))), str(arguments(node)["op"])
    if op == "sum":
        return make_rule(node, [names], [names], linear=linear_groups(node, (0,)))
    return make_rule(node, [names], [names], through=() if op == "same" else ((op, (0,)),))


@rule(BERNOULLI_PART)
def bernoulli_part(node: fx.Node) -> Rule:
    """A dropout mask of one micro-batch: a rank draws the whole one and keeps its piece of the micro-batch's piece."""
    named = arguments(node)
    names = letters(len(shape_of(node)))
    base = list(named["offset"])

    def localize(call: LocalCall) -> Any:
        offset = [
            start + (call.pieces[name].offset if name in call.pieces else 0)
            for start, name in zip(base, map(str, names))
        ]
        return emit_with(call, offset=offset, length=list(call.result_shapes[0]))

    return make_rule(node, [[]], [names], localize=localize, random=True)
