"""Compile what a lowered graph computes between its collectives by Inductor."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.errors import LoweringError
from autopar.passes.collective_calls import WAIT, is_collective
from autopar.passes.cost.compute import is_view
from autopar.passes.ops import norms
from autopar.passes.program import has_many_results, is_getitem, touches_generator
from autopar.passes.torch_private import compile_graph, take_arguments_in_a_list

FEWEST = 2
"""Ops in a segment: there is nothing to fuse in one, and views do not count."""


def compile_segments(module: fx.GraphModule) -> fx.GraphModule:
    """Return a graph whose runs of ops between collectives, waits and random ops are each one compiled call.

    Collectives and waits stay where the passes put them, so their order is that of the graph on every rank, whatever
    the compiler makes of the rest, and random ops draw in order. Equal runs (those of repeated layers) are compiled
    once, at their first call.

    Args:
        module: with groups bound; its nodes have ``val``.

    Raises:
        LoweringError: at the first call, when Inductor fails; it says what to do.
    """
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    known: dict[str, Compiled] = {}
    run: list[fx.Node] = []
    for node in module.graph.nodes:
        if _is_plain(node):
            if not is_getitem(node):  # results are taken out where they are made
                run += [node, *(node.users if has_many_results(node) else ())]
            continue
        _emit(module, graph, env, run, known)
        run = []
        env[node] = graph.node_copy(node, env.__getitem__)
    return fx.GraphModule(module, take_arguments_in_a_list(graph))


class Compiled:
    """A run of ops that is compiled at its first call, once for each form of its operands.

    Compiled code holds for the strides that it was compiled for, and inputs may come in others.
    """

    def __init__(self, graph: fx.Graph, owner: torch.nn.Module) -> None:
        self._module = fx.GraphModule(owner, graph)
        self._by_form: dict[tuple[Any, ...], Callable[..., Sequence[Any]]] = {}

    def __call__(self, *operands: Tensor) -> Sequence[Any]:
        """Return the results."""
        form = tuple(operand.stride() for operand in operands)
        run = self._by_form.get(form)
        if run is None:
            run = self._by_form[form] = self._compile(operands)
        return run(*operands)

    def _compile(self, operands: Sequence[Tensor]) -> Callable[..., Sequence[Any]]:
        try:
            compiled: Callable[..., Sequence[Any]] = compile_graph(self._module, [each.detach() for each in operands])
            return compiled
        except Exception as error:
            names = ", ".join(dict.fromkeys(str(n.target) for n in self._module.graph.nodes if n.op == "call_function"))
            raise LoweringError(
                f"compile=True: Inductor could not compile a run of {len(self._module.graph.nodes)} nodes ({names}): "
                f"{type(error).__name__}: {str(error)[:500]}; it needs a C++ compiler (g++) on the CPU and Triton on "
                "GPUs; leave compile= out to run the same program without it"
            ) from error


def _is_plain(node: fx.Node) -> bool:
    """Tell whether a node may become part of a compiled run."""
    if node.op == "get_attr":
        return False
    if node.op != "call_function" or is_collective(node) or node.target is WAIT or touches_generator(node):
        return False
    if is_getitem(node):
        return _is_plain(node.all_input_nodes[0])
    reads_tensors = all(isinstance(source.meta.get("val"), (Tensor, tuple, list)) for source in node.all_input_nodes)
    return reads_tensors and isinstance(node.meta.get("val"), (Tensor, tuple, list))


def _emit(
    module: fx.GraphModule,
    graph: fx.Graph,
    env: dict[fx.Node, fx.Node],
    run: Sequence[fx.Node],
    known: dict[str, Compiled],
) -> None:
    """Add a run of ops to a graph: as one compiled call, or as it is where it is too short."""
    if sum(not (is_view(node.target) or is_getitem(node)) for node in run) < FEWEST:
        for node in run:
            env[node] = graph.node_copy(node, env.__getitem__)
        return
    inside = set(run)
    takes = list(dict.fromkeys(s for node in run for s in node.all_input_nodes if s not in inside))
    gives = [node for node in run if any(user not in inside for user in node.users) and not has_many_results(node)]
    body = _body(run, takes, gives)
    form = ";".join(f"{list(s.meta['val'].shape)}{s.meta['val'].dtype}" for s in takes)
    compiled = known.setdefault(f"{_text(body)}|{form}", Compiled(body, module))
    call = graph.create_node("call_function", _as_function(compiled), tuple(env[source] for source in takes))
    for index, node in enumerate(gives):
        env[node] = graph.call_function(operator.getitem, (call, index))
        env[node].meta = dict(node.meta)


def _as_function(compiled: Compiled) -> Callable[..., Sequence[Any]]:
    def segment(*operands: Tensor) -> Sequence[Any]:
        return compiled(*operands)

    return segment


def _body(run: Sequence[fx.Node], takes: Sequence[fx.Node], gives: Sequence[fx.Node]) -> fx.Graph:
    body = fx.Graph()
    inner: dict[fx.Node, fx.Node] = {}
    for index, source in enumerate(takes):
        inner[source] = body.placeholder(f"a{index}")
    for index, node in enumerate(run):
        inner[node] = body.create_node(
            node.op,
            norms.MATH.get(node.target, node.target),
            *fx.node.map_arg((node.args, dict(node.kwargs)), inner.__getitem__),
            name=f"v{index}",
        )
    body.output(tuple(inner[node] for node in gives))
    return body


def _text(body: fx.Graph) -> str:
    return "\n".join(node.format_node() or "" for node in body.nodes) + str(body.output_node().args)
