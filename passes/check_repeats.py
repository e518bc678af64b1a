"""Look whether a second call of a model, after the first, computes the same: a program can only repeat the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.errors import CaptureError

from . import torch_private
from .clean_graph import clean_graph
from .decompositions import decomposition_table
from .program import ancestors, is_random
from .python_state import KeptGenerators, generator_states
from .trace_joint import Joint

aten = torch.ops.aten
_SAME_NUMBERS = (aten.detach.default, aten.alias.default, aten.clone.default, aten.lift_fresh_copy.default)


class Twice:
    """The function that is traced: the forward of a joint function, and again with what the first call left behind."""

    def __init__(self, joint: Joint, generators: KeptGenerators) -> None:
        self.joint = joint
        self.generators = generators
        self.sizes: list[int] = []
        self.plain: list[Any] = []
        self.drawn: list[dict[str, Any]] = []
        self.random: list[int] = []

    def __call__(self, *arguments: Tensor) -> list[Tensor]:
        """Return the outputs and new buffers of both calls."""
        out: list[Tensor] = []
        for seed in (1, 2):
            self.generators.seed(seed)
            results, plain = self.joint.run_forward(arguments)
            self.drawn.append(generator_states())
            self.plain.append(plain)
            self.sizes.append(len(results))
            out += results
        return out


def check_repeats(joint: Joint, fakes: list[Tensor], changed: Sequence[str], drawn: Sequence[str]) -> None:
    """Check that two calls with the same arguments compute the same; run where the model may be changed by it.

    Args:
        joint: not run yet.
        fakes: the arguments.
        changed: attributes and globals that one call has changed.
        drawn: random generators that it drew from.

    Raises:
        CaptureError: they differ, or the second call fails where the first does not.
    """
    with KeptGenerators() as generators:
        twice = Twice(joint, generators)
        try:
            graph_module = torch_private.trace_graph(twice, fakes, decomposition_table())
        except Exception as error:
            if len(twice.sizes) != 1:
                raise
            raise CaptureError(_message(changed, f"the next call fails ({type(error).__name__}: {error})")) from error
    both = zip(twice.drawn[0], *(states.values() for states in twice.drawn))
    own = [name for name, first, second in both if name in drawn and first != second]
    if own:
        raise CaptureError(
            f"the model draws numbers from {' and '.join(own)} while it runs, and a compiled program would repeat them "
            "in every step. Draw them with torch (torch.rand), or outside of the model and pass them in."
        )
    line = _difference(graph_module, twice)
    if line is not None:
        raise CaptureError(_message(changed, f"the next call computes something else{line}"))


def _message(changed: Sequence[str], what: str) -> str:
    names = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
    return (
        f"the model keeps state in Python: a call changes {names}, so that {what}. A compiled program would repeat "
        "the first call. Make tensors buffers (register_buffer), and pass numbers in as tensors or arguments."
    )


def _difference(graph_module: fx.GraphModule, twice: Twice) -> str | None:
    """Return where the second call differs, as `` at file:line: code`` or empty; None if it does not."""
    graph = clean_graph(graph_module, [n.name for n in graph_module.graph.nodes if n.op == "placeholder"]).graph
    ends: Any = graph.output_node().args[0]
    first, second = ends[: twice.sizes[0]], ends[twice.sizes[0] :]
    values = _Values(ancestors(_nodes(first)))
    known = {values.of(node) for node in graph.nodes if node in values.first}
    if twice.plain[0] == twice.plain[1] and [values.of(n) for n in first] == [values.of(n) for n in second]:
        return None
    others = ancestors(_nodes(second)) - values.first
    for node in graph.nodes:
        if node in others and values.of(node) not in known and node.meta.get("source"):
            return f" at {node.meta['source']}"
    return ""


def _nodes(ends: Sequence[Any]) -> list[fx.Node]:
    return [end for end in ends if isinstance(end, fx.Node)]


class _Values:
    """Numbers for the values of a graph: equal for two nodes that compute the same from the same arguments.

    The random ops of each call are numbered in their order: the second call starts where the generator then is, but
    computes the same otherwise.
    """

    def __init__(self, first: set[fx.Node]) -> None:
        self.first = first
        self._numbers: dict[Any, int] = {}
        self._of: dict[fx.Node, int] = {}
        self._drawn = {True: 0, False: 0}

    def of(self, node: Any) -> Any:
        """Return the number of a node's value; a constant for what is no node."""
        if not isinstance(node, fx.Node):
            return repr(node)
        for each in _in_order(node, self._of):
            self._of[each] = self._new(each)
        return self._of[node]

    def _new(self, node: fx.Node) -> int:
        if node.target in _SAME_NUMBERS:
            return self._of[node.all_input_nodes[0]]
        key: tuple[Any, ...] = (node.op, str(node.target))
        if node.op == "get_attr":
            key = (node.op, _content(getattr(node.graph.owning_module, str(node.target), None)))
        elif node.op == "call_function":
            arguments = pytree.tree_map(lambda a: ("node", self._of[a]) if isinstance(a, fx.Node) else repr(a), (
                node.args, node.kwargs))  # fmt: skip
            key = (*key, repr(arguments))
            if is_random(node):
                call = node in self.first
                self._drawn[call] += 1
                key = (*key, self._drawn[call])
        return self._numbers.setdefault(key, len(self._numbers))


def _in_order(node: fx.Node, done: dict[fx.Node, int]) -> Iterator[fx.Node]:
    """Yield the node and all that it is computed from, sources first, without what is done."""
    needed = ancestors([node]) if node not in done else set()
    yield from (each for each in node.graph.nodes if each in needed and each not in done)


def _content(value: Any) -> Any:
    if not isinstance(value, Tensor) or not torch_private.is_real(value) or value.device.type == "meta":
        return id(value)
    with torch_private.outside_of_trace():
        data = value.detach().cpu().contiguous().reshape(-1)
        return value.dtype, tuple(value.shape), data.view(torch.uint8).numpy().tobytes() if data.numel() else b""
