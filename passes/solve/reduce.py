"""Exact reductions: strategies and arcs that some optimal plan does without are taken out before the solver sees them.

A strategy is left out when another one of the same decision is never dearer, whatever all other decisions are: the
work it saves (or adds) plus, for every network it touches, the worst that the change can cost there (Goldstein's
criterion for dead-end elimination, Biophys. J. 66 (1994) 1335, on a network of cost functions). For a network with one
reader the worst is exact: ``max over sources s of way(s, new) - way(s, old)``. With several readers, whose ways share
arcs, it is bounded by prolonging the old way: ``way(old, new)``. Bytes must not grow.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from autopar.errors import ConstraintError

from .layout_graph import Bools, Floats, Ints
from .problem import Network, Problem

_CHUNK = 1 << 22


def reduce_problem(problem: Problem, *, dominate: bool = True, sweeps: int = 4) -> Problem:
    """Return a problem with fewer strategies and the same optimum.

    Raises:
        ConstraintError: some tensor can't reach its readers in any way (constraints contradict one another).
    """
    problem = drop_unreachable(problem)
    for _ in range(sweeps if dominate else 0):
        before = sum(len(decision.strategies) for decision in problem.decisions)
        problem = drop_unreachable(_Eliminator(problem).run())
        if sum(len(decision.strategies) for decision in problem.decisions) == before:
            break
    return problem


def drop_unreachable(problem: Problem) -> Problem:
    """Take out strategies that demand a layout nobody can give, or give one from which a reader can't be served."""
    touched = _networks_of(problem)
    rows = [np.ones(len(decision.strategies), dtype=np.bool_) for decision in problem.decisions]
    waiting = dict.fromkeys(range(len(problem.networks)))
    while waiting:
        number = next(iter(waiting))
        del waiting[number]
        for index in _check_reach(problem, problem.networks[number], rows):
            waiting.update(dict.fromkeys(touched[index]))
    for decision, keep in zip(problem.decisions, rows, strict=True):
        if not keep.any():
            raise ConstraintError(
                f"no strategy of {decision.name} fits together with those of its neighbours; "
                "loosen the constraints near it"
            )
    return problem.with_rows(rows)


def _networks_of(problem: Problem) -> dict[int, list[int]]:
    touched: dict[int, list[int]] = defaultdict(list)
    for number, network in enumerate(problem.networks):
        for index in dict.fromkeys((network.producer, *(reader.decision for reader in network.all_readers))):
            touched[index].append(number)
    return touched


def _check_reach(problem: Problem, network: Network, rows: list[Bools]) -> list[int]:
    """Clear the rows that the network makes impossible; return the decisions that lost any."""
    lost = []
    finite: Bools = np.isfinite(network.graph.dist)
    sources = problem.sources(network)
    for reader in network.all_readers:
        demands = problem.demands(network, reader)
        served = np.zeros(len(network.graph) + 1, dtype=np.bool_)
        served[:-1] = finite[np.unique(sources[rows[network.producer]])].any(axis=0)
        bad = rows[reader.decision] & ~served[demands]
        if bad.any():
            rows[reader.decision] &= ~bad
            lost.append(reader.decision)
        wanted = np.unique(demands[rows[reader.decision]])
        gives: Bools = np.any(finite[:, wanted], axis=1)
        bad = rows[network.producer] & ~gives[sources]
        if bad.any():
            rows[network.producer] &= ~bad
            lost.append(network.producer)
    return lost


class _Change:
    """What replacing one row of a decision (by row) by another (by column) costs at the worst.

    Where regions hide communication, a change of compute by ``c`` and of what may hide by ``h`` costs a region
    ``max(c, h)`` at the worst: it may be bound by either.
    """

    def __init__(self, problem: Problem, index: int, work: Floats) -> None:
        self.problem, self.index, self.work = problem, index, work
        self.hiding = hiding = problem.hiding
        parts = hiding.decisions[index] if hiding.is_exact else ()
        apart = hiding.compute_weight(index, problem.decisions[index].multiplicity)
        self.exposed = work * (apart - sum(count for _, count in parts))
        self.computed = {group: work * count for group, count in parts}
        self.hidden: dict[int, Floats] = {}

    def travel(self, number: int, change: Floats) -> None:
        """Add what it changes in the travels of a network."""
        parts = self.hiding.networks[number] if self.hiding.is_exact else ()
        share = self.hiding.contention if parts else 1.0
        weight = self.hiding.travel_weight(number, self.problem.networks[number].multiplicity)
        self.exposed = self.exposed + change * (share * weight)
        for group, count in parts:
            self.hidden[group] = self.hidden.get(group, 0.0) + change * (self.hiding.hidden_share * count)

    def plus(self, other: _Change) -> _Change:
        """Return both changes at once."""
        out = _Change(self.problem, self.index, self.work)
        out.exposed = self.exposed + other.exposed
        for name in ("computed", "hidden"):
            mine, its = getattr(self, name), getattr(other, name)
            setattr(out, name, {group: mine.get(group, 0.0) + its.get(group, 0.0) for group in {**mine, **its}})
        return out

    def worst(self) -> Floats:
        """Return the worst of every change."""
        total = self.exposed
        for group in {**self.computed, **self.hidden}:
            total = total + np.maximum(self.computed.get(group, 0.0), self.hidden.get(group, 0.0))
        return total


@dataclass
class _Eliminator:
    """One sweep of dead-end elimination over all decisions."""

    problem: Problem

    def __post_init__(self) -> None:
        self.rows = [np.ones(len(d.strategies), dtype=np.bool_) for d in self.problem.decisions]
        self.touched = _networks_of(self.problem)
        self.nodes: dict[tuple[int, int], Ints] = {}

    def run(self) -> Problem:
        for index in range(len(self.problem.decisions)):
            if len(self.rows[index]) > 1:
                self._eliminate(index)
        return self.problem.with_rows(self.rows)

    def _eliminate(self, index: int) -> None:
        decision = self.problem.decisions[index]
        work = decision.strategies.seconds
        once = _Change(self.problem, index, work[None, :] - work[:, None])
        twice = _Change(self.problem, index, once.work)  # what computing it again adds
        barred = decision.strategies.bytes[None, :] > decision.strategies.bytes[:, None]
        if decision.repeatable:
            barred |= decision.strategies.result_bytes[None, :] > decision.strategies.result_bytes[:, None]
        for number in self.touched[index]:
            network = self.problem.networks[number]
            for reader in network.all_readers:
                if reader.decision == index:
                    demands = self.problem.demands(network, reader)
                    change = _spread(self._demand_change(network, demands), demands)
                    once.travel(number, change)
                    if reader in network.again_readers:
                        twice.travel(number, change)
            if network.producer == index:
                sources = self.problem.sources(network)
                change = _spread(self._source_change(network, sources), sources)
                once.travel(number, change)
                if network.two_phases:
                    twice.travel(number, change)
        beaten = (once.worst() <= 0) & ~barred & ~np.eye(len(work), dtype=np.bool_)
        if decision.repeatable:
            beaten &= once.plus(twice).worst() <= 0
        alive = self.rows[index]
        for row in np.flatnonzero(beaten.any(axis=1))[::-1]:
            if (beaten[row] & alive).any():
                alive[row] = False
        assert alive.any()

    def _alone(self, network: Network) -> bool:
        """Tell whether the network has one reader of its own phase, whose decision is not also its producer."""
        readers = network.all_readers
        return len(readers) == 1 and not network.two_phases and readers[0].decision != network.producer

    def _demand_change(self, network: Network, demands: Ints) -> tuple[Ints, Floats]:
        """Return the distinct nodes demanded and what changing from one (row) to another (column) costs at worst."""
        used = np.unique(demands)
        dist = network.graph.dist_s
        if not self._alone(network):
            return used, dist[np.ix_(used, used)]
        sources = np.unique(self.problem.sources(network)[self.rows[network.producer]])
        return used, _worst_change(dist[np.ix_(sources, used)])

    def _source_change(self, network: Network, sources: Ints) -> tuple[Ints, Floats]:
        """Return the distinct nodes given and what changing from one (row) to another (column) costs at worst."""
        used = np.unique(sources)
        dist = network.graph.dist_s
        if not self._alone(network):
            return used, dist[np.ix_(used, used)].T
        (reader,) = network.readers
        wanted = np.unique(self.problem.demands(network, reader)[self.rows[reader.decision]])
        return used, _worst_change(dist[np.ix_(used, wanted)].T)


def _worst_change(cost: Floats) -> Floats:
    """Return ``max over witnesses w of cost[w, new] - cost[w, old]`` as ``[old, new]``; no way before bars nothing."""
    witnesses, count = cost.shape
    out = np.full((count, count), -np.inf)
    step = max(1, _CHUNK // max(1, count * count))
    with np.errstate(invalid="ignore"):
        for begin in range(0, witnesses, step):
            part = cost[begin : begin + step]
            change = part[:, None, :] - part[:, :, None]
            change[np.isnan(change)] = -np.inf
            change = np.where(np.isfinite(part)[:, :, None], change, -np.inf)
            out = np.maximum(out, change.max(axis=0))
    return out


def _spread(change: tuple[Ints, Floats], nodes: Ints) -> Floats:
    used, matrix = change
    at = np.searchsorted(used, nodes)
    return matrix[np.ix_(at, at)]


def useful_arcs(problem: Problem, network: Network) -> Bools:
    """Tell which arcs of a network's graph some optimal plan may need.

    An arc dearer than another way between its ends is never needed. With one reader, the ways of one
    shortest-path tree for each source that lead to a demanded node are enough.
    """
    graph = network.graph
    sources = np.unique(problem.sources(network))
    wanted = np.unique(np.concatenate([problem.demands(network, reader) for reader in network.all_readers]))
    if len(network.all_readers) == 1 and not network.two_phases:
        return _tree_arcs(graph.before, sources, wanted, graph.source, graph.target)
    keep = graph.seconds <= graph.dist_s[graph.source, graph.target]
    finite: Bools = np.isfinite(graph.dist)
    from_source: Bools = np.any(finite[sources], axis=0)
    to_wanted: Bools = np.any(finite[:, wanted], axis=1)
    if network.two_phases:
        to_wanted |= True
    return keep & from_source[graph.source] & to_wanted[graph.target]


def _tree_arcs(before: Ints, sources: Ints, wanted: Ints, source: Ints, target: Ints) -> Bools:
    """Return the arcs on the shortest-path tree of every source that lie on the way to a wanted node."""
    count = len(before)
    used = np.zeros((count, count), dtype=np.bool_)
    for start in sources.tolist():
        parent = before[start]
        ends = wanted[(parent[wanted] >= 0)]
        while len(ends):
            parents = parent[ends]
            used[parents, ends] = True
            ends = np.unique(parents[(parents != start)])
            ends = ends[parent[ends] >= 0]
    return used[source, target]
