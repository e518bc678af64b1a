"""A hand-made program, small enough to know its lowering by heart: ``sum(relu(x @ w.T))`` and the gradient of ``w``."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

import autopar.passes.ops  # noqa: F401
from autopar.passes.program import Input, Output, Program
from autopar.passes.rules.rule import Factor, Rule

ATEN: Any = torch.ops.aten
CONTRACT: Any = torch.ops.autopar.contract.default


def tiny_program(rows: int = 6, width: int = 5, out: int = 7) -> Program:
    """Return the program with its rules already on the nodes."""
    graph = fx.Graph()
    b, i, o = Factor("b", rows, role="batch"), Factor("i", width, "sum", role="row"), Factor("o", out, role="column")

    def add(phase: str, target: Any, args: tuple[Any, ...], shape: tuple[int, ...], rule: Rule | None) -> fx.Node:
        node = graph.placeholder(target) if rule is None else graph.call_function(target, args)
        node.meta.update(val=torch.empty(shape, device="meta"), phase=phase, module="up", source="")
        if rule is not None:
            node.meta["rule"] = rule
        return node

    def summed(*factors: Factor) -> tuple[Factor, ...]:
        return tuple(Factor(f.name, f.size, "sum", role=f.role) for f in factors)

    w = add("forward", "w", (), (out, width), None)
    x = add("forward", "x", (), (rows, width), None)
    t = add("backward", "t", (), (), None)
    product = Rule(
        (b, o, i), (("b", "i"), ("o", "i")), (("b", "o"),), linear=((0,), (1,)), flops=2.0 * rows * width * out
    )
    pointwise = Rule((b, o), (("b", "o"),), (("b", "o"),))
    h = add("forward", CONTRACT, (x, w, "ab,cb->ac"), (rows, out), product)
    r = add("forward", ATEN.relu.default, (h,), (rows, out), pointwise)
    total = Rule(summed(b, o), (("b", "o"),), ((),), linear=((0,),))
    s = add("forward", ATEN.sum.default, (r,), (), total)
    spread = Rule((b, o), ((),), (("b", "o"),), linear=((0,),), localize=_spread)
    e = add("backward", ATEN.expand.default, (t, [rows, out]), (rows, out), spread)
    masked = Rule((b, o), (("b", "o"), ("b", "o")), (("b", "o"),), linear=((0,),))
    m = add("backward", ATEN.threshold_backward.default, (e, r, 0), (rows, out), masked)
    batch = Factor("b", rows, "sum", role="batch")
    outer = Rule((batch, o, Factor("i", width)), (("b", "o"), ("b", "i")), (("o", "i"),), linear=((0,), (1,)))
    g = add("backward", CONTRACT, (m, x, "ac,ab->cb"), (out, width), outer)
    graph.output((s, g))
    leaf = pytree.tree_flatten(((0,), {}))[1]
    return Program(
        fx.GraphModule(torch.nn.Module(), graph),
        (
            Input("w", "parameter", "up.weight", requires_grad=True),
            Input("x", "input", "args[0]", 0),
            Input("t", "tangent", "[0]", 0),
        ),
        (Output("output", "[0]", s.name, 0), Output("gradient", "up.weight", g.name, of="w")),
        leaf,
        pytree.tree_flatten(0)[1],
        loss=0,
    )


def _spread(call: Any) -> Any:
    return call.again(call.args[0], list(call.result_shapes[0]))


def tiny_step(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and the gradient of ``w``, computed by eager autograd."""
    w = w.clone().requires_grad_()
    loss = torch.relu(x @ w.T).sum()
    (gradient,) = torch.autograd.grad(loss, w)
    return loss.detach(), gradient
