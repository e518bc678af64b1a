"""Brute force: every strategy of every op, every set of arcs, of saved layouts and of ops computed again.

Nothing of the ILP is used; which ops may be computed again, and which tensors may travel behind which compute, are its
definition, and come from ``passes/segments.py`` and ``passes/find_hideable.py``.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from functools import lru_cache, partial
from itertools import chain, combinations, product
from typing import Any

import torch

from autopar.mesh import Mesh
from autopar.passes.cost.collectives import bucketed_seconds, collective_seconds
from autopar.passes.cost.compute import compute_dtype, is_view, local_lengths, local_seconds
from autopar.passes.cost.devices import device, mesh_links
from autopar.passes.cost.fusion import ALONE
from autopar.passes.cost.memory import parameter_bytes
from autopar.passes.find_hideable import find_bucketed, find_hideable
from autopar.passes.fold import fold
from autopar.passes.insert_collectives import arc_bytes
from autopar.passes.program import Program, result_values, tensor_operands
from autopar.passes.redistribution import Arc, arcs_from, layout_is_legal
from autopar.passes.rules.legality import legal_strategies, operand_layouts, result_layouts
from autopar.passes.segments import cut_segments, repeatable_ops
from autopar.placement import REPLICATE, Layout, local_shape
from autopar.plans import Options

Row = tuple[tuple[Layout, ...], tuple[Layout, ...], float, int]
"""Operand layouts, result layouts, seconds, bytes."""


class Oracle:
    """The optimum of a program by enumeration; only for a handful of single-result ops.

    It prices what the planner prices, so a program is planned before it is enumerated: what fused kernels keep to
    themselves is marked on its nodes.
    """

    def __init__(self, program: Program, mesh: Mesh, options: Options) -> None:
        self.program, self.mesh, self.options = program, mesh, options
        self.device, self.links = device(mesh.device), mesh_links(mesh)
        self.origin = (0,) * mesh.num_axes
        self.nodes = program.nodes()
        self.travel_options = lru_cache(maxsize=None)(self._travel_options)
        self.hideable, self.bucketed = find_hideable(program), find_bucketed(program)
        self.segments = cut_segments(program, fold(program))
        repeatable = sorted(repeatable_ops(program, self.segments)) if options.memory is not None else []
        self.again_sets = [
            frozenset(names)
            for names in chain.from_iterable(combinations(repeatable, count) for count in range(len(repeatable) + 1))
        ]

    def best_seconds(self) -> float:
        """Return the least seconds of a step within the budget; infinite when nothing fits."""
        rows = self._rows()
        names = list(rows)
        best = math.inf
        for combination in product(*(rows[name] for name in names)):
            best = min(best, self._price(dict(zip(names, combination)), best))
        return best

    def least_bytes(self) -> int:
        """Return the smallest budget with a plan, by looking at every plan."""
        free = Oracle(self.program, self.mesh, Options(optimizer=self.options.optimizer, memory=1 << 60))
        rows = free._rows()
        names = list(rows)
        least = 1 << 60
        for combination in product(*(rows[name] for name in names)):
            chosen = dict(zip(names, combination))
            for again in free.again_sets:
                total = sum(row[3] for row in chosen.values()) + free._bytes_back(chosen, again)
                for options in free._travels(chosen, again) or [[(math.inf, 1 << 60)]]:
                    total += min(num_bytes for _, num_bytes in options)
                least = min(least, total)
        return least

    def _bytes_back(self, chosen: dict[str, Row], again: frozenset[str]) -> int:
        """Return the bytes that one segment's ops bring back when they are computed again, the largest of all."""
        totals: dict[int, int] = defaultdict(int)
        for name in again:
            if is_view(self.nodes[name].target):
                continue
            for (_, value), layout in zip(result_values(self.nodes[name]), chosen[name][1]):
                shape = local_shape(value.shape, layout, self.mesh.sizes, self.origin)
                totals[self.segments[name]] += math.prod(shape) * value.dtype.itemsize
        return max(totals.values(), default=0)

    def _rows(self) -> dict[str, list[Row]]:
        whole = (REPLICATE,) * self.mesh.num_axes
        rows: dict[str, list[Row]] = {}
        for role in self.program.inputs:
            value = self.nodes[role.node].meta["val"]
            layouts = [whole]
            if role.kind == "parameter":
                codes = [[REPLICATE, *range(value.dim())] if n > 1 else [REPLICATE] for n in self.mesh.sizes]
                layouts = [lay for lay in product(*codes) if layout_is_legal(value.shape, lay, self.mesh.sizes)]
            for layout in layouts:
                numel = math.prod(local_shape(value.shape, layout, self.mesh.sizes, self.origin))
                kept = parameter_bytes(numel, value.dtype.itemsize, role.requires_grad, self.options.optimizer).total
                row = ((layout,), (layout,), 0.0, kept if role.kind == "parameter" else 0)
                rows.setdefault(role.node, []).append(row)
        for node in self.program.ops():
            rows[node.name] = list(self._op_rows(node))
        return rows

    def _op_rows(self, node: Any) -> Any:
        operands = [operand.meta["val"] for operand in tensor_operands(node)]
        results = [value for _, value in result_values(node)]
        shapes = [tuple(v.shape) for v in operands], [tuple(v.shape) for v in results]
        rule, traffic = node.meta["rule"], node.meta.get("traffic", ALONE)
        for choices in legal_strategies(rule, *shapes, self.mesh):
            before, after = operand_layouts(choices), result_layouts(choices)
            if not operands:
                before = ()
            local = [
                [local_shape(s, lay, self.mesh.sizes, self.origin) for s, lay in zip(side, layouts)]
                for side, layouts in zip(shapes, (before, after))
            ]
            tensors, pieces, whole = [*operands, *results], [*local[0], *local[1]], [*shapes[0], *shapes[1]]
            shares = [traffic.share("operands", slot) for slot in range(len(operands))]
            shares += [traffic.share("results", slot) for slot in range(len(results))]
            moved = sum(math.prod(p) * v.dtype.itemsize * share for p, v, share in zip(pieces, tensors, shares))
            lengths = local_lengths(rule, pieces, whole)
            dtype = compute_dtype(tensors)
            seconds = local_seconds(
                node.target, rule, lengths, float(moved), dtype, self.device, launches=traffic.launches
            )
            yield before, after, seconds, 0

    def _travels(self, chosen: dict[str, Row], again: frozenset[str]) -> list[list[tuple[float, int]]]:
        early: dict[str, set[Layout]] = defaultdict(set)
        late: dict[str, set[Layout]] = defaultdict(set)
        for node in self.program.ops():
            for operand, layout in zip(tensor_operands(node), chosen[node.name][0]):
                (late if node.meta["phase"] == "backward" else early)[operand.name].add(layout)
                if node.name in again:
                    late[operand.name].add(layout)
        for output in self.program.outputs:
            assert output.node is not None
            if output.kind == "gradient":
                late[output.node].add(chosen[output.of][0][0])
            else:
                early[output.node].add((REPLICATE,) * self.mesh.num_axes)
        out = []
        for name, row in chosen.items():
            node = self.nodes[name]
            start = "rests" if node.op == "placeholder" else "again" if name in again else "saved"
            if node.meta["phase"] == "backward" and node.op != "placeholder":
                start = "again"
            options = self.travel_options(name, row[1][0], frozenset(early[name]), frozenset(late[name]), start)
            if not options:
                return []
            out.append(options)
        return out

    def _price(self, chosen: dict[str, Row], best: float) -> float:
        seconds = sum(row[2] for row in chosen.values())
        if seconds >= best:
            return math.inf
        found = math.inf
        for again in self.again_sets:
            twice = seconds + sum(chosen[name][2] for name in again)
            if twice < min(best, found):
                found = min(found, self._price_again(chosen, again, twice))
        return found

    def _price_again(self, chosen: dict[str, Row], again: frozenset[str], seconds: float) -> float:
        travels = self._travels(chosen, again)
        if not travels:
            return math.inf
        kept = sum(row[3] for row in chosen.values()) + self._bytes_back(chosen, again)
        budget = self.options.memory
        if budget is None:
            return seconds + self._paid(chosen, again, [min(cost for cost, _ in options) for options in travels])
        found = math.inf
        for picks in product(*travels):
            if kept + sum(num_bytes for _, num_bytes in picks) <= budget:
                found = min(found, seconds + self._paid(chosen, again, [cost for cost, _ in picks]))
        return found

    def _paid(self, chosen: dict[str, Row], again: frozenset[str], travels: list[float]) -> float:
        """Return the seconds of travel that no region hides."""
        share = 1.0 - self.device.contention if self.options.overlap else 0.0
        computed: dict[int, float] = defaultdict(float)
        moved: dict[int, float] = defaultdict(float)
        for name, cost in zip(chosen, travels):
            region = self.hideable.regions[name]
            computed[region] += chosen[name][2] * (2 if name in again else 1)
            if name in self.hideable.tensors:
                moved[region] += cost * share
        return sum(travels) - sum(min(computed[region], cost) for region, cost in moved.items())

    def _travel_options(
        self, name: str, source: Layout, early: frozenset[Layout], late: frozenset[Layout], start: str
    ) -> list[tuple[float, int]]:
        """Return the undominated ``(seconds, saved bytes)`` of serving all readers; empty when that is impossible."""
        value = self.nodes[name].meta["val"]
        if start == "again":
            total = self._tree(name, {source}, early) + self._tree(name, {source}, late)
            return [(total, 0)] if total < math.inf else []
        if self.options.memory is None:
            total = self._tree(name, {source}, early | late)
            return [(total, 0)] if total < math.inf else []
        if not late:
            total = self._tree(name, {source}, early)
            return [(total, 0)] if total < math.inf else []
        codes = [[REPLICATE, *range(value.dim())] if n > 1 else [REPLICATE] for n in self.mesh.sizes]
        layouts = [lay for lay in product(*codes) if layout_is_legal(value.shape, lay, self.mesh.sizes)]
        found = []
        rests = {source} if start == "rests" else set()
        for count in (0, 1, 2):
            for kept in combinations(layouts, count):
                total = self._tree(name, {source}, early | set(kept)) + self._tree(name, rests | set(kept), late)
                num_bytes = sum(
                    math.prod(local_shape(value.shape, lay, self.mesh.sizes, self.origin)) * value.dtype.itemsize
                    for lay in kept
                )
                if total < math.inf:
                    found.append((total, num_bytes))
        return [a for a in found if not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in found)]

    def _tree(self, name: str, starts: set[Layout], wanted: frozenset[Layout] | set[Layout]) -> float:
        """Return the least seconds of arcs after which all of ``wanted`` is had: Dijkstra over sets of layouts."""
        value = self.nodes[name].meta["val"]
        bucketed = self.bucketed.get(name)
        key = (tuple(value.shape), value.dtype.itemsize, bucketed, frozenset(starts), frozenset(wanted))
        if key not in _TREES.setdefault(self.mesh, {}):
            self.price: Any = partial(bucketed_seconds, company=bucketed) if bucketed else collective_seconds
            _TREES[self.mesh][key] = self._search(value, frozenset(starts), frozenset(wanted))
        return _TREES[self.mesh][key]

    def _search(self, value: torch.Tensor, starts: frozenset[Layout], wanted: frozenset[Layout]) -> float:
        queue: list[tuple[float, int, frozenset[Layout]]] = [(0.0, 0, starts)]
        seen: set[frozenset[Layout]] = set()
        tick = 0
        while queue:
            cost, _, had = heapq.heappop(queue)
            if had in seen:
                continue
            seen.add(had)
            if wanted <= had:
                return cost
            if len(had) > len(starts) + 5:
                continue
            for layout in sorted(had):
                for arc in arcs_from(layout, tuple(value.shape), self.mesh.sizes):
                    if arc.target not in had:
                        tick += 1
                        heapq.heappush(queue, (cost + self._arc_seconds(value, arc), tick, had | {arc.target}))
        return math.inf

    def _arc_seconds(self, value: torch.Tensor, arc: Arc) -> float:
        handed = float(arc_bytes(tuple(value.shape), value.dtype.itemsize, arc, self.mesh.sizes))
        ranks, link = self.mesh.sizes[arc.axis], self.links[arc.axis]
        ends = arc.source[arc.axis], arc.target[arc.axis]
        return float(self.price(arc.kind, ranks, handed, *ends, link, self.device))


_TREES: dict[Mesh, dict[Any, float]] = {}
