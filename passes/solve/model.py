"""The linear program: sparse arrays made from a problem."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from scipy.sparse import csr_matrix

from .layout_graph import Bools, Floats, Ints
from .problem import Network, Problem, Reader
from .reduce import useful_arcs

TIE_S_PER_BYTE = 1e-18
"""What a kept byte weighs besides: of plans that take equally long, the one that keeps less is chosen."""


@dataclass(frozen=True, eq=False)
class Flow:
    """One reader's unit of flow through a network, as variables.

    Attributes:
        producer, reader: decisions at its two ends.
        starts: nodes where it may start under every strategy of the producer, ``[ways, rows]``.
        demands: node where it ends under every strategy of the reader.
        source, target: nodes of every arc that it may use.
        variables: one an arc.
        optional: it flows only if the reader is computed again.
    """

    producer: int
    reader: int
    starts: Ints
    demands: Ints
    source: Ints
    target: Ints
    variables: Ints
    optional: bool


@dataclass(frozen=True, eq=False)
class LinearModel:
    """``min cost x`` with ``row_lower <= matrix x <= row_upper`` and ``0 <= x <= upper``.

    Attributes:
        cost: seconds a unit of every variable.
        upper: bound of every variable: 1 for a choice, infinite for flows, the most of an amount.
        integral: variables that decide: strategies, computing again, opened arcs, saved layouts.
        matrix, row_lower, row_upper: the rows.
        first_variable: decision -> its first variable; its strategies follow one another.
        first_again: the same of "computed again with this strategy"; -1 for a decision that can't be.
        saves: variable of ``(network, node)`` where the network's tensor may be saved.
        flows: of every reader of every network.
        memory_bytes: bytes of one unit of every variable.
        memory_unit: bytes that one unit of the memory row stands for; 0 when there is no such row.
        memory_row: its index; -1 when there is none.
    """

    cost: Floats
    upper: Floats
    integral: Bools
    matrix: csr_matrix
    row_lower: Floats
    row_upper: Floats
    first_variable: Ints
    first_again: Ints
    saves: dict[tuple[int, int], int]
    flows: tuple[Flow, ...]
    memory_bytes: Ints
    memory_unit: int
    memory_row: int = -1

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
    """The arcs that one network offers: its graph, or two copies of it joined by what the backward can start from.

    Nodes of the second copy come after all nodes of the first. ``late`` marks the arcs that only the backward may use,
    ``saved_node`` the arcs that save a layout, ``rest_node`` those that lead over where the tensor rests.
    """

    source: Ints
    target: Ints
    seconds: Floats
    num_bytes: Ints
    late: Bools
    num_nodes: int
    saved_node: Ints
    rest_node: Ints


@dataclass(frozen=True)
class _Commodity:
    """One reader's unit of flow: in its own phase, in the backward, or there only if it is computed again."""

    reader: Reader
    late: bool
    again: bool


def build_model(problem: Problem, *, objective: str = "seconds") -> LinearModel:
    """Return the linear program of a problem.

    Args:
        problem: what to decide.
        objective: ``"seconds"``, or ``"bytes"`` to find the least memory (then there is no memory row).
    """
    return _Build(problem, objective, problem.budget).run()


class _Build:
    def __init__(self, problem: Problem, objective: str, budget: int | None) -> None:
        self.problem, self.objective, self.budget = problem, objective, budget
        self.bounded = problem.budget is not None or objective == "bytes"
        self.out = _Rows()
        self.first = np.zeros(len(problem.decisions), dtype=np.int64)
        self.again = np.full(len(problem.decisions), -1, dtype=np.int64)
        self.saves: dict[tuple[int, int], int] = {}
        self.flows: list[Flow] = []
        self.hides = objective == "seconds" and problem.hiding.is_exact
        self.moved: dict[int, list[tuple[Ints, Floats]]] = {}
        self.amounts: dict[int, float] = {}

    def run(self) -> LinearModel:
        out = self.out
        for index, decision in enumerate(self.problem.decisions):
            chosen = decision.strategies
            seconds = chosen.seconds * self.problem.hiding.compute_weight(index, decision.multiplicity)
            made = out.variables(seconds, chosen.bytes * decision.multiplicity, True)
            self.first[index] = made[0]
            row = out.new_rows(1, 1.0, 1.0)
            out.put(np.full(len(made), row), made, 1.0)
            if decision.repeatable and self.bounded:
                kept = np.full(len(made), decision.again_bytes * decision.multiplicity, dtype=np.int64)
                anew = out.variables(seconds, kept, True)
                self.again[index] = anew[0]
                rows = out.new_rows(len(made), -math.inf, 0.0) + np.arange(len(made))
                out.put(rows, anew, 1.0)
                out.put(rows, made, -1.0)
        for number, network in enumerate(self.problem.networks):
            self._network(number, network)
        if self.hides:
            self._hide()
        return _finish(self)

    def _hide(self) -> None:
        """Add, for every group of regions, the seconds by which what may hide is longer than what computes.

        ``max(compute, hideable)`` is compute plus this excess: not negative, and at least hideable less compute.
        """
        hiding, out = self.problem.hiding, self.out
        columns: list[list[Ints]] = [[] for _ in range(hiding.num_groups)]
        weights: list[list[Floats]] = [[] for _ in range(hiding.num_groups)]
        for number, parts in enumerate(hiding.networks):
            for group, count in parts:
                for variables, seconds in self.moved[number]:
                    columns[group].append(variables)
                    weights[group].append(seconds * count)
        for index, parts in enumerate(hiding.decisions):
            seconds = self.problem.decisions[index].strategies.seconds
            for first in (self.first[index], self.again[index]):
                for group, count in parts if first >= 0 else ():
                    columns[group].append(first + np.arange(len(seconds)))
                    weights[group].append(-seconds * count)
        for variables, seconds in zip(map(np.concatenate, columns), map(np.concatenate, weights), strict=True):
            unit = float(np.abs(seconds).max(initial=0.0))
            if not (seconds > 0).any():
                continue
            excess = out.variables(np.array([unit]), np.zeros(1, dtype=np.int64), False)
            self.amounts[int(excess[0])] = float(np.maximum(seconds, 0.0).sum()) / unit
            row = out.new_rows(1, -math.inf, 0.0)
            out.rows.append(np.full(len(variables) + 1, row))
            out.cols.append(np.concatenate([variables, excess]))
            out.vals.append(np.append(seconds / unit, -1.0))

    def _network(self, number: int, network: Network) -> None:
        out, problem, scale = self.out, self.problem, network.multiplicity
        repeated = self.again[network.producer] >= 0
        ways = _ways(problem, network, self.bounded, bool(repeated))
        moved = self.moved.setdefault(number, [])
        share, weight = 1.0, problem.hiding.travel_weight(number, scale)
        if self.hides and problem.hiding.networks[number]:
            share = problem.hiding.contention

        def pay(arcs: Ints, num_bytes: Ints, decides: bool, paid: Bools | None = None) -> Ints:
            """Add a variable an arc; where it may hide, only what it slows is paid here."""
            seconds = ways.seconds[arcs] if paid is None else np.where(paid, ways.seconds[arcs], 0.0)
            made = out.variables(seconds * (weight * share), num_bytes, decides)
            if share < 1.0:
                moved.append((made, seconds * (1.0 - share)))
            return made

        commodities = [_Commodity(reader, False, False) for reader in network.readers]
        commodities += [_Commodity(reader, self.bounded, False) for reader in network.late_readers]
        if self.bounded:
            commodities += [_Commodity(reader, True, True) for reader in network.again_readers]
        usable = [self._usable(network, ways, commodity) for commodity in commodities]
        sharers = np.sum(usable, axis=0) if usable else np.zeros(len(ways.source))
        weighs = (ways.seconds > 0) | (ways.num_bytes > 0)
        shared = np.flatnonzero((sharers > 1) & weighs)
        opened = np.full(len(ways.source), -1, dtype=np.int64)
        opened[shared] = pay(shared, ways.num_bytes[shared] * scale, True)
        for commodity, arcs in zip(commodities, usable, strict=True):
            own = np.flatnonzero(arcs)
            pays = sharers[own] == 1
            flow = pay(own, np.where(pays, ways.num_bytes[own] * scale, 0), False, pays)
            self._conserve(network, ways, commodity, own, flow)
            coupled = opened[own] >= 0
            rows = out.new_rows(int(coupled.sum()), -math.inf, 0.0) + np.arange(int(coupled.sum()))
            out.put(rows, flow[coupled], 1.0)
            out.put(rows, opened[own][coupled], -1.0)
            if commodity.late:
                self._bound_rest(network, ways, own, flow)
                for arc, variable in zip(own.tolist(), flow.tolist(), strict=True):
                    if ways.saved_node[arc] >= 0:
                        self.saves[number, int(ways.saved_node[arc])] = (
                            int(opened[arc]) if opened[arc] >= 0 else variable
                        )

    def _conserve(self, network: Network, ways: _Ways, commodity: _Commodity, own: Ints, flow: Ints) -> None:
        """Add one row a node: what flows in, or starts there, flows out, or is demanded there."""
        out, reader, count = self.out, commodity.reader, len(network.graph)
        sources = self.problem.sources(network)
        demands = self.problem.demands(network, reader) + (count if commodity.late else 0)
        anew = int(self.again[network.producer]) if commodity.late else -1
        starts = np.concatenate([sources, sources + count]) if anew >= 0 else sources
        used = np.unique(np.concatenate([ways.source[own], ways.target[own], starts, demands]))
        base = out.new_rows(len(used), 0.0, 0.0)

        def put(nodes: Ints, variables: Ints, value: float) -> None:
            out.put(base + np.searchsorted(used, nodes), variables, value)

        self.flows.append(
            Flow(
                network.producer,
                reader.decision,
                starts.reshape(-1, len(sources)),
                demands,
                ways.source[own],
                ways.target[own],
                flow,
                commodity.again,
            )
        )
        put(ways.target[own], flow, 1.0)
        put(ways.source[own], flow, -1.0)
        rows = np.arange(len(sources))
        put(sources, self.first[network.producer] + rows, 1.0)
        if anew >= 0:
            put(sources, anew + rows, -1.0)
            put(sources + count, anew + rows, 1.0)
        if commodity.again:
            put(demands, self.again[reader.decision] + np.arange(len(demands)), -1.0)
            ends = np.unique(starts)
            put(ends, out.variables(np.zeros(len(ends)), np.zeros(len(ends), dtype=np.int64), False), -1.0)
        else:
            put(demands, self.first[reader.decision] + np.arange(len(demands)), -1.0)

    def _bound_rest(self, network: Network, ways: _Ways, own: Ints, flow: Ints) -> None:
        """Let only a tensor that rests in a layout start from there in the backward."""
        at = np.flatnonzero(ways.rest_node[own] >= 0)
        if not len(at):
            return
        sources = self.problem.sources(network)
        base = self.out.new_rows(len(at), -math.inf, 0.0)
        for row, place in enumerate(at.tolist()):
            self.out.put(np.array([base + row]), flow[place : place + 1], 1.0)
            here = np.flatnonzero(sources == ways.rest_node[own[place]])
            self.out.put(np.full(len(here), base + row), self.first[network.producer] + here, -1.0)

    def _usable(self, network: Network, ways: _Ways, commodity: _Commodity) -> Bools:
        """Tell which arcs can lie on a reader's way: reachable from a source, leading to one of its demands."""
        count = len(network.graph)
        demands = np.unique(self.problem.demands(network, commodity.reader)) + (count if commodity.late else 0)
        sources = np.unique(self.problem.sources(network))
        if commodity.late and self.again[network.producer] >= 0:
            sources = np.concatenate([sources, sources + count])
        allowed = np.ones(len(ways.source), dtype=np.bool_) if commodity.late else ~ways.late
        ahead = _closure(ways.num_nodes, sources, ways.source[allowed], ways.target[allowed])
        back = _closure(ways.num_nodes, demands, ways.target[allowed], ways.source[allowed])
        return allowed & ahead[ways.source] & back[ways.target]


def _ways(problem: Problem, network: Network, bounded: bool, repeated: bool) -> _Ways:
    graph = network.graph
    keep = np.flatnonzero(useful_arcs(problem, network))
    source, target, seconds = graph.source[keep], graph.target[keep], graph.seconds[keep]
    none = np.zeros(len(keep), dtype=np.int64)
    if not (bounded and network.two_phases):
        no_node = np.full(len(keep), -1, dtype=np.int64)
        return _Ways(source, target, seconds, none, none > 0, len(graph), no_node, no_node)
    saved = np.flatnonzero(graph.complete)
    rests = np.unique(problem.sources(network)) if network.resting else np.zeros(0, dtype=np.int64)
    late_keep = np.flatnonzero(_late_arcs(network, repeated))
    count = len(graph)
    parts = (len(keep), len(saved), len(rests), len(late_keep))

    def column(place: int, values: Ints, other: int) -> Ints:
        return np.concatenate(
            [values if i == place else np.full(n, other, dtype=np.int64) for i, n in enumerate(parts)]
        )

    return _Ways(
        np.concatenate([source, saved, rests, graph.source[late_keep] + count]),
        np.concatenate([target, saved + count, rests + count, graph.target[late_keep] + count]),
        np.concatenate([seconds, np.zeros(len(saved) + len(rests)), graph.seconds[late_keep]]),
        column(1, graph.numel[saved] * graph.itemsize, 0),
        column(0, none, 1) > 0,
        2 * count,
        column(1, saved, -1),
        column(2, rests, -1),
    )


def _late_arcs(network: Network, repeated: bool) -> Bools:
    """Tell which arcs the backward copy needs: from complete layouts, and from any where the op is computed again."""
    graph = network.graph
    return (graph.complete[graph.source] | repeated) & (graph.seconds <= graph.dist_s[graph.source, graph.target])


def _closure(num_nodes: int, start: Ints, source: Ints, target: Ints) -> Bools:
    seen = np.zeros(num_nodes, dtype=np.bool_)
    seen[start] = True
    while True:
        fresh = target[seen[source] & ~seen[target]]
        if not len(fresh):
            return seen
        seen[fresh] = True


def _finish(build: _Build) -> LinearModel:
    """Add what is computed again at one time, and the memory row; put all together."""
    out, problem = build.out, build.problem
    num_bytes = np.concatenate(out.num_bytes)
    weights = [_again_weights(build, segment) for segment in problem.segments] if build.bounded else []
    everything = np.concatenate([num_bytes, *(values for _, values in weights)])
    unit = _memory_unit(everything)
    num_bytes = num_bytes.copy()
    upper = np.where(np.concatenate(out.decides), 1.0, np.inf)
    for variable, most in build.amounts.items():
        upper[variable] = most
    if weights:
        (peak,) = out.variables(np.zeros(1), np.array([unit]), False).tolist()
        out.decides[-1][:] = False
        num_bytes = np.append(num_bytes, unit)
        upper = np.append(upper, max(int(values.sum()) for _, values in weights) / unit)
        for variables, values in weights:
            row = out.new_rows(1, -math.inf, 0.0)
            out.rows.append(np.full(len(variables) + 1, row))
            out.cols.append(np.append(variables, peak))
            out.vals.append(np.append(values / unit, -1.0))
    memory_row = -1
    cost = np.concatenate(out.cost) + TIE_S_PER_BYTE * num_bytes
    if build.objective == "bytes":
        cost = num_bytes.astype(np.float64) / unit
    elif build.budget is not None:
        weighs = np.flatnonzero(num_bytes)
        row = out.new_rows(1, -math.inf, (build.budget - problem.fixed_bytes) / unit)
        memory_row = row
        out.rows.append(np.full(len(weighs), row))
        out.cols.append(weighs)
        out.vals.append(num_bytes[weighs].astype(np.float64) / unit)
    matrix = csr_matrix(
        (np.concatenate(out.vals), (np.concatenate(out.rows), np.concatenate(out.cols))),
        shape=(out.num_rows, out.num_variables),
    )
    return LinearModel(
        cost,
        upper,
        np.concatenate(out.decides),
        matrix,
        np.concatenate(out.lower),
        np.concatenate(out.upper),
        build.first,
        build.again,
        build.saves,
        tuple(build.flows),
        num_bytes,
        unit if memory_row >= 0 else 0,
        memory_row,
    )


def _again_weights(build: _Build, segment: tuple[tuple[int, int], ...]) -> tuple[Ints, Ints]:
    """Return the variables of a segment's ops computed again, and the bytes of what each brings back."""
    variables, values = [], []
    for index, count in segment:
        strategies = build.problem.decisions[index].strategies
        variables.append(build.again[index] + np.arange(len(strategies)))
        values.append(strategies.result_bytes * count)
    return np.concatenate(variables), np.concatenate(values)


def _memory_unit(values: Ints) -> int:
    """Return the bytes that the memory row counts in: their common divisor, or what keeps its entries moderate."""
    divisor = int(np.gcd.reduce(values)) if len(values) else 1
    return max(1, divisor, 1 << max(0, int(values.max(initial=1)).bit_length() - 16))
