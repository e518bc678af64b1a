"""A point in a program that is passed when all ranks are known to run it."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from autopar.passes.collective_calls import is_collective
from autopar.passes.split_phases import GraphOnly


class Gate:
    """Holds what is to be done before the first collective of a call: until then ranks need not wait for each other."""

    def __init__(self) -> None:
        self._pending: Callable[[], None] | None = None

    def set(self, agree: Callable[[], None]) -> None:
        """Say what is to be done in this call."""
        self._pending = agree

    def open(self) -> None:
        """Do it, unless it is done."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()

    def built_into(self, half: fx.GraphModule) -> fx.GraphModule:
        """Return a lowered forward that opens the gate before its first collective, or at its end."""

        def open_gate() -> None:
            self.open()

        graph = fx.Graph()
        graph.output(graph.graph_copy(half.graph, {}))
        first = next((node for node in graph.nodes if is_collective(node)), graph.output_node())
        with graph.inserting_before(first):
            graph.call_function(open_gate)
        return GraphOnly(half, graph)
