"""The linear program: sparse arrays made from a problem."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from scipy.sparse import csr_matrix

from .layout_graph import Bools, Floats, Ints
from .problem import Network, Problem, Reader
from .reduce import useful_arcs


@dataclass(frozen=True, eq=False)
class LinearModel:
    """``min cost x`` with ``row_lower <= matrix x <= row_upper`` and ``0 <= x <= upper``.

    Attributes:
        cost: seconds a unit of every variable.
        upper: bound of every variable; infinite for flows.
        integral: variables that decide: strategies, opened arcs, saved layouts.
        matrix, row_lower, row_upper: the rows.
        first_variable: decision -> its first variable; its strategies follow one another.
        saves: variable of ``(network, node)`` where the network's tensor may be saved.
        memory_bytes: bytes of one unit of every variable.
        memory_unit: bytes that one unit of the memory row stands for; 0 when there is no such row.
    """

    cost: Floats
    upper: Floats
    integral: Bools
    matrix: csr_matrix
    row_lower: Floats
    row_upper: Floats
    first_variable: Ints
    saves: dict[tuple[int, int], int]
    memory_bytes: Ints
    memory_unit: int

    @property
    def num_variables(self) -> int:
        """Columns."""
        return len(self.cost)

    @property
    def num_rows(self) -> int:
        """Rows."""
        return len(self.row_lower)


@dataclass
class _Rows:
    """Columns and triplets under construction."""

    cost: list[Floats] = field(default_factory=list)
    num_bytes: list[Ints] = field(default_factory=list)
    decides: list[Bools] = field(default_factory=list)
    num_variables: int = 0
    rows: list[Ints] = field(default_factory=list)
    cols: list[Ints] = field(default_factory=list)
    vals: list[Floats] = field(default_factory=list)
    lower: list[Floats] = field(default_factory=list)
    upper: list[Floats] = field(default_factory=list)
    num_rows: int = 0

    def variables(self, cost: Floats, num_bytes: Ints, decides: bool) -> Ints:
        """Add variables; one that has bytes decides too, or memory would be shared out in fractions."""
        count = len(cost)
        self.cost.append(cost)
        self.num_bytes.append(num_bytes)
        self.decides.append((num_bytes > 0) | decides)
        self.num_variables += count
        return np.arange(self.num_variables - count, self.num_variables, dtype=np.int64)

    def new_rows(self, count: int, lower: float, upper: float) -> int:
        self.lower.append(np.full(count, lower))
        self.upper.append(np.full(count, upper))
        self.num_rows += count
        return self.num_rows - count

    def put(self, rows: Ints, cols: Ints, value: float) -> None:
        self.rows.append(rows)
        self.cols.append(cols)
        self.vals.append(np.full(len(rows), value))


@dataclass(frozen=True, eq=False)
class _Ways:
    """The arcs that one network offers: its graph, or two copies of it joined by what may be saved.

    Nodes of the second copy come after all nodes of the first. ``late`` marks the arcs that only late readers may use.
    """

    source: Ints
    target: Ints
    seconds: Floats
    num_bytes: Ints
    late: Bools
    num_nodes: int
    saved_node: Ints


def build_model(problem: Problem, *, objective: str = "seconds", budget: int | None = None) -> LinearModel:
    """Return the linear program of a problem.

    Args:
        problem: what to decide.
        objective: ``"seconds"``, or ``"bytes"`` to find the least memory (then there is no memory row).
        budget: bytes for the memory row; the problem's own by default.
    """
    out = _Rows()
    first = np.zeros(len(problem.decisions), dtype=np.int64)
    for index, decision in enumerate(problem.decisions):
        chosen = decision.strategies
        made = out.variables(chosen.seconds * decision.multiplicity, chosen.bytes * decision.multiplicity, True)
        first[index] = made[0]
        row = out.new_rows(1, 1.0, 1.0)
        out.put(np.full(len(made), row), made, 1.0)
    bounded = problem.budget is not None or objective == "bytes"
    saves: dict[tuple[int, int], int] = {}
    for number, network in enumerate(problem.networks):
        _add_network(out, problem, number, network, first, saves, bounded)
    return _finish(out, problem, first, saves, objective, problem.budget if budget is None else budget)


def _add_network(
    out: _Rows,
    problem: Problem,
    number: int,
    network: Network,
    first: Ints,
    saves: dict[tuple[int, int], int],
    bounded: bool,
) -> None:
    ways = _ways(problem, network, bounded)
    sources = problem.sources(network)
    late = dict.fromkeys(network.late_readers, bounded)
    commodities = [(reader, late.get(reader, False)) for reader in network.all_readers]
    usable = [_usable(problem, network, ways, reader, is_late) for reader, is_late in commodities]
    sharers = np.sum(usable, axis=0)
    weighs = (ways.seconds > 0) | (ways.num_bytes > 0)
    shared = np.flatnonzero((sharers > 1) & weighs)
    scale = network.multiplicity
    opened = np.full(len(ways.source), -1, dtype=np.int64)
    opened[shared] = out.variables(ways.seconds[shared] * scale, ways.num_bytes[shared] * scale, True)
    for (reader, is_late), arcs in zip(commodities, usable, strict=True):
        own = np.flatnonzero(arcs)
        pays = sharers[own] == 1
        flow = out.variables(
            np.where(pays, ways.seconds[own] * scale, 0.0), np.where(pays, ways.num_bytes[own] * scale, 0), False
        )
        demands = problem.demands(network, reader) + (len(network.graph) if is_late else 0)
        used = np.unique(np.concatenate([ways.source[own], ways.target[own], sources, demands]))
        base = out.new_rows(len(used), 0.0, 0.0)
        out.put(base + np.searchsorted(used, ways.target[own]), flow, 1.0)
        out.put(base + np.searchsorted(used, ways.source[own]), flow, -1.0)
        out.put(base + np.searchsorted(used, sources), first[network.producer] + np.arange(len(sources)), 1.0)
        out.put(base + np.searchsorted(used, demands), first[reader.decision] + np.arange(len(demands)), -1.0)
        coupled = opened[own] >= 0
        rows = out.new_rows(int(coupled.sum()), -math.inf, 0.0) + np.arange(int(coupled.sum()))
        out.put(rows, flow[coupled], 1.0)
        out.put(rows, opened[own][coupled], -1.0)
        if is_late:
            for arc, variable in zip(own.tolist(), flow.tolist(), strict=True):
                if ways.saved_node[arc] >= 0:
                    saves[number, int(ways.saved_node[arc])] = int(opened[arc]) if opened[arc] >= 0 else variable


def _ways(problem: Problem, network: Network, bounded: bool) -> _Ways:
    graph = network.graph
    keep = np.flatnonzero(useful_arcs(problem, network))
    source, target, seconds = graph.source[keep], graph.target[keep], graph.seconds[keep]
    none = np.zeros(len(keep), dtype=np.int64)
    if not (bounded and network.late_readers):
        no_node = np.full(len(keep), -1, dtype=np.int64)
        return _Ways(source, target, seconds, none, none > 0, len(graph), no_node)
    nodes = np.flatnonzero(graph.complete)
    late_keep = np.flatnonzero(_late_arcs(problem, network))
    num_late = len(late_keep)
    count = len(graph)
    return _Ways(
        np.concatenate([source, nodes, graph.source[late_keep] + count]),
        np.concatenate([target, nodes + count, graph.target[late_keep] + count]),
        np.concatenate([seconds, np.zeros(len(nodes)), graph.seconds[late_keep]]),
        np.concatenate([none, graph.numel[nodes] * graph.itemsize, np.zeros(num_late, dtype=np.int64)]),
        np.concatenate([none > 0, np.ones(len(nodes) + num_late, dtype=np.bool_)]),
        2 * count,
        np.concatenate([none - 1, nodes, np.full(num_late, -1, dtype=np.int64)]),
    )


def _late_arcs(problem: Problem, network: Network) -> Bools:
    """Tell which arcs the backward copy needs, starting from any complete layout."""
    graph = network.graph
    return graph.complete[graph.source] & (graph.seconds <= graph.dist_s[graph.source, graph.target])


def _usable(problem: Problem, network: Network, ways: _Ways, reader: Reader, is_late: bool) -> Bools:
    """Tell which arcs can lie on a reader's way: reachable from a source, leading to one of its demands."""
    demands = np.unique(problem.demands(network, reader)) + (len(network.graph) if is_late else 0)
    sources = np.unique(problem.sources(network))
    allowed = np.ones(len(ways.source), dtype=np.bool_) if is_late else ~ways.late
    ahead = _closure(ways.num_nodes, sources, ways.source[allowed], ways.target[allowed])
    back = _closure(ways.num_nodes, demands, ways.target[allowed], ways.source[allowed])
    return allowed & ahead[ways.source] & back[ways.target]


def _closure(num_nodes: int, start: Ints, source: Ints, target: Ints) -> Bools:
    seen = np.zeros(num_nodes, dtype=np.bool_)
    seen[start] = True
    while True:
        fresh = target[seen[source] & ~seen[target]]
        if not len(fresh):
            return seen
        seen[fresh] = True


def _finish(
    out: _Rows, problem: Problem, first: Ints, saves: dict[tuple[int, int], int], objective: str, budget: int | None
) -> LinearModel:
    cost, num_bytes = np.concatenate(out.cost), np.concatenate(out.num_bytes)
    unit = 0
    if objective == "bytes":
        cost = num_bytes.astype(np.float64) / max(1, _common_divisor(num_bytes))
    elif budget is not None:
        weighs = np.flatnonzero(num_bytes)
        unit = max(1, _common_divisor(num_bytes))
        row = out.new_rows(1, -math.inf, float((budget - problem.fixed_bytes) // unit))
        out.rows.append(np.full(len(weighs), row))
        out.cols.append(weighs)
        out.vals.append(num_bytes[weighs].astype(np.float64) / unit)
    matrix = csr_matrix(
        (np.concatenate(out.vals), (np.concatenate(out.rows), np.concatenate(out.cols))),
        shape=(out.num_rows, out.num_variables),
    )
    decides = np.concatenate(out.decides)
    return LinearModel(
        cost,
        np.where(decides, 1.0, np.inf),
        decides,
        matrix,
        np.concatenate(out.lower),
        np.concatenate(out.upper),
        first,
        saves,
        num_bytes,
        unit,
    )


def _common_divisor(values: Ints) -> int:
    return int(np.gcd.reduce(values)) if len(values) else 1
