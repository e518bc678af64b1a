"""The problem that is solved: decisions with their strategies, and one network a tensor between them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import fx

from autopar.errors import ConstraintError
from autopar.placement import REPLICATE, local_shape, parse_layout
from autopar.plans import Options

from ..cost.memory import parameter_bytes
from ..enumerate_strategies import Strategies, StrategyTable, layouts_as_strategies
from ..find_hideable import find_bucketed
from ..fold import Folding
from ..ops.random_state import random_state_bytes
from ..program import Input, Output, Program, has_many_results, is_getitem, is_random, result_values, tensor_operands
from ..segments import cut_segments, repeatable_ops
from .hiding import NO_HIDING, Hiding, find_hiding
from .layout_graph import Bools, Ints, LayoutGraph, LayoutGraphs, Prices, decode, encode


class Constraints(Protocol):
    """What a user asked of single nodes."""

    def key(self, name: str) -> Hashable:
        """Return what was asked of an op or placeholder, None for a free one."""
        ...

    def rows(self, name: str, strategies: Strategies) -> Bools | None:
        """Return the rows that it may take, None for all."""
        ...


class NoConstraints:
    """Every node is free."""

    def key(self, name: str) -> Hashable:
        """Return None."""
        return None

    def rows(self, name: str, strategies: Strategies) -> Bools | None:
        """Return None."""
        return None


@dataclass(frozen=True, order=True)
class Reader:
    """One operand slot of one decision."""

    decision: int
    slot: int


@dataclass(frozen=True, eq=False)
class Decision:
    """A choice of one strategy, shared by all nodes of a class.

    Attributes:
        name: the class's first node, or ``output <position>``.
        strategies: what may be chosen.
        multiplicity: how many nodes share it.
        repeatable: the ops may be computed again in the backward instead of being saved.
        again_bytes: what each op keeps until then besides: the random state that it draws from.
    """

    name: str
    strategies: Strategies
    multiplicity: int = 1
    repeatable: bool = False
    again_bytes: int = 0


@dataclass(frozen=True, eq=False)
class Network:
    """How one tensor (or several alike) gets from the decision that makes it to those that read it.

    Attributes:
        tensor: the first of them.
        members: all of them.
        phase: in which the tensor starts and ``readers`` read it.
        producer, slot: the decision whose result ``slot`` it is.
        readers: those in ``phase``.
        late_readers: those of the backward, which start from what the forward saved (only when ``phase`` is forward).
        again_readers: those of ``readers`` that read it once more in the backward if they are computed again.
        resting: the producer's layout is there in the backward without being saved (a parameter, buffer or input).
        graph: its layouts and arcs.
    """

    tensor: str
    members: tuple[str, ...]
    phase: str
    producer: int
    slot: int
    readers: tuple[Reader, ...]
    late_readers: tuple[Reader, ...]
    again_readers: tuple[Reader, ...]
    resting: bool
    graph: LayoutGraph

    @property
    def multiplicity(self) -> int:
        """How many tensors travel alike."""
        return len(self.members)

    @property
    def all_readers(self) -> tuple[Reader, ...]:
        """Readers of both phases."""
        return self.readers + self.late_readers

    @property
    def two_phases(self) -> bool:
        """Whether the backward may read it beside the forward."""
        return bool(self.late_readers or self.again_readers)


@dataclass(frozen=True, eq=False)
class Problem:
    """A split problem.

    Attributes:
        prices: the mesh and its links.
        decisions, networks: see there.
        fixed_bytes: what every plan keeps on a rank (buffers).
        budget: bytes a rank, or None.
        tied: decision of every op, placeholder and module output (``output <position>``).
        num_regions: runs of repeated blocks.
        segments: ``(repeatable decision, ops)`` pairs of every segment of the forward; alike segments once.
        hiding: which transfers hide behind which decisions' compute.
    """

    prices: Prices
    decisions: tuple[Decision, ...]
    networks: tuple[Network, ...]
    fixed_bytes: int
    budget: int | None
    tied: dict[str, int]
    num_regions: int = 0
    segments: tuple[tuple[tuple[int, int], ...], ...] = ()
    hiding: Hiding = NO_HIDING

    def sources(self, network: Network, strategies: Strategies | None = None) -> Ints:
        """Return the graph node where the tensor starts under every strategy of its producer."""
        strategies = strategies or self.decisions[network.producer].strategies
        return network.graph.nodes(strategies.results[:, network.slot])

    def demands(self, network: Network, reader: Reader) -> Ints:
        """Return the graph node that a reader demands under each of its strategies; -1 for one that can't be had."""
        return network.graph.nodes(self.decisions[reader.decision].strategies.operands[:, reader.slot])

    def without_budget(self) -> Problem:
        """Return the problem where memory is free: nothing needs to be computed again."""
        decisions = tuple(replace(decision, repeatable=False) for decision in self.decisions)
        networks = tuple(replace(network, again_readers=()) for network in self.networks)
        return replace(self, decisions=decisions, networks=networks, budget=None, segments=())

    def with_rows(self, rows: list[Bools]) -> Problem:
        """Return the problem with only these strategies of every decision."""
        kept = tuple(
            decision if keep.all() else replace(decision, strategies=decision.strategies.take(keep))
            for decision, keep in zip(self.decisions, rows, strict=True)
        )
        return replace(self, decisions=kept)


@dataclass
class _Builder:
    program: Program
    prices: Prices
    options: Options
    folding: Folding
    constraints: Constraints
    graphs: LayoutGraphs
    table: StrategyTable
    full_table: StrategyTable
    segment_of: dict[str, int]
    decisions: list[Decision] = field(default_factory=list)
    tied: dict[str, int] = field(default_factory=dict)
    gradient_slot: dict[str, str] = field(default_factory=dict)

    def build(self) -> Problem:
        program = self.program
        fixed = 0
        members = Counter(self.folding.class_of.values())
        for role in program.inputs:
            if role.kind != "tangent":
                self._decide(role.node, members, lambda role=role: self._input_strategies(role))  # type: ignore[misc]
            if role.kind == "buffer":
                value = self._value(role.node)
                fixed += value.numel() * value.dtype.itemsize
        for node in program.ops():
            self._decide(node.name, members, lambda node=node: self._op_strategies(node))  # type: ignore[misc]
        self._decide_outputs()
        networks = self._networks()
        tensors = [network.members for network in networks]
        return Problem(
            self.prices,
            tuple(self.decisions),
            networks,
            fixed,
            self.options.memory,
            self.tied,
            self.folding.num_regions,
            self._segments(),
            find_hiding(program, self._contention(), self.tied, tensors),
        )

    def _contention(self) -> float:
        return 1.0 if self.options.overlap is False else self.prices.device.contention

    def _mark_repeatable(self) -> None:
        """Find the classes of which every op may be computed again."""
        allowed = repeatable_ops(self.program, self.segment_of)
        barred = {self.folding.class_of[node.name] for node in self.program.ops() if node.name not in allowed}
        self.repeatable = {self.folding.class_of[name] for name in allowed} - barred

    def _segments(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        members: dict[int, Counter[int]] = defaultdict(Counter)
        for name, segment in self.segment_of.items():
            if self.decisions[self.tied[name]].repeatable:
                members[segment][self.tied[name]] += 1
        return tuple(dict.fromkeys(tuple(sorted(counts.items())) for counts in members.values()))

    def _decide(self, name: str, members: Counter[str], make: Callable[[], Strategies]) -> None:
        first = self.folding.class_of[name]
        if first in self.tied:
            self.tied[name] = self.tied[first]
            return
        strategies = make()
        allowed = self.constraints.rows(name, strategies)
        if allowed is not None:
            strategies = strategies.take(allowed)
        again_bytes = random_state_bytes(self.prices.mesh.device) if is_random(self._nodes[name]) else 0
        self._add(name, Decision(name, strategies, members[first], first in self.repeatable, again_bytes))

    def _op_strategies(self, node: fx.Node) -> Strategies:
        table = self.table if self.constraints.key(node.name) is None else self.full_table
        return table.strategies(node)

    def _add(self, name: str, decision: Decision) -> None:
        self.tied[name] = len(self.decisions)
        self.decisions.append(decision)

    def _value(self, name: str) -> torch.Tensor:
        value = self._nodes[name].meta["val"]
        assert isinstance(value, torch.Tensor)
        return value

    def __post_init__(self) -> None:
        self._nodes = self.program.nodes()
        self.bucketed = find_bucketed(self.program, self.options.disable)
        self._mark_repeatable()

    def _complete_layouts(self, value: torch.Tensor) -> Ints:
        return self.graphs.graph(tuple(value.shape), value.dtype.itemsize, ()).layouts

    def _whole(self) -> Ints:
        return np.array([encode((REPLICATE,) * self.prices.mesh.num_axes)], dtype=np.int64)

    def _input_strategies(self, role: Input) -> Strategies:
        value = self._value(role.node)
        if role.kind == "buffer":
            return layouts_as_strategies(self._whole())
        if role.kind == "input":
            return layouts_as_strategies(self._input_layout(role, value))
        graph = self.graphs.graph(tuple(value.shape), value.dtype.itemsize, ())
        num_bytes = np.array([self._resting_bytes(role, value, int(code)) for code in graph.layouts], dtype=np.int64)
        strategies = layouts_as_strategies(graph.layouts, num_bytes=num_bytes)
        pinned = self.options.pinned.get(role.name)
        if pinned is None:
            return strategies
        keep = strategies.results[:, 0] == encode(parse_layout(pinned))
        if not keep.any():
            raise ConstraintError(
                f"{role.name} is pinned to {pinned}, which its shape {tuple(value.shape)} can't have "
                f"on {self.prices.mesh}"
            )
        return strategies.take(keep)

    def _resting_bytes(self, role: Input, value: torch.Tensor, layout: int) -> int:
        sizes = self.prices.mesh.sizes
        shape = local_shape(value.shape, decode(layout, len(sizes)), sizes, (0,) * len(sizes))
        optimizer = self.options.optimizer
        return parameter_bytes(math.prod(shape), value.dtype.itemsize, role.requires_grad, optimizer, shape).total

    def _input_layout(self, role: Input, value: torch.Tensor) -> Ints:
        mesh = self.prices.mesh
        layout = [REPLICATE] * mesh.num_axes
        if self.options.inputs == "local" and value.dim() and value.shape[0] > 1 and mesh.sizes[0] > 1:
            if value.shape[0] % mesh.sizes[0]:
                raise ConstraintError(
                    f"inputs='local' asks that each rank pass its share of {role.name}, but its first dim of "
                    f"{value.shape[0]} does not divide by the {mesh.sizes[0]} ranks of axis {mesh.names[0]}; "
                    f"change the batch or pass inputs='global'"
                )
            layout[0] = 0
        return np.array([encode(tuple(layout))], dtype=np.int64)

    def _decide_outputs(self) -> None:
        """Add a decision for every module output: the layout in which it is returned, which its tangent shares."""
        for position, output in enumerate(self.program.outputs):
            if output.node is None or output.kind == "gradient":
                continue
            layouts = self._whole()
            if output.kind == "buffer":
                role = self.program.input_of(output.of)
                layouts = self._whole() if role.kind == "buffer" else self._input_layout(role, self._value(output.node))
            elif output.kind == "output" and self._may_lie(output):
                layouts = self._complete_layouts(self._value(output.node))
            self._add(output_name(position), Decision(output_name(position), layouts_as_strategies(layouts)))
            for role in self.program.inputs:
                if output.kind == "output" and role.kind == "tangent" and role.index == output.index:
                    self.tied[role.node] = self.tied[output_name(position)]
        for role in self.program.inputs:
            if role.node not in self.tied:
                self._add(role.node, Decision(role.node, layouts_as_strategies(self._whole())))

    def _may_lie(self, output: Output) -> bool:
        if self.options.outputs == "full" or output.index == self.program.loss:
            return False
        return self.options.outputs == "lie" or self.program.loss is not None

    def _networks(self) -> tuple[Network, ...]:
        readers = self._readers()
        groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
        for name, (producer, slot, phase) in self._tensors().items():
            early, late = (tuple(sorted(part.items())) for part in readers[name])
            bucketed = self.bucketed.get(name)
            if phase == "backward":
                groups["backward", producer, slot, _merged(early, late), (), bucketed].append(name)
            else:
                groups["forward", producer, slot, early, late, bucketed].append(name)
        out = []
        for (phase, producer, slot, early, late, _), names in groups.items():
            if early or late:
                network = self._network(names, phase, producer, slot, early, late)
                out.append(network)
        return tuple(out)

    def _network(
        self,
        names: list[str],
        phase: str,
        producer: int,
        slot: int,
        early: tuple[tuple[Reader, int], ...],
        late: tuple[tuple[Reader, int], ...],
    ) -> Network:
        value = self._value(names[0])
        results = self.decisions[producer].strategies.results[:, slot]
        num_axes = self.prices.mesh.num_axes
        codes = {code for layout in set(results.tolist()) for code in decode(layout, num_axes)}
        partials = tuple(sorted(code for code in codes if code < REPLICATE))
        company = self.bucketed.get(names[0])
        graph = self.graphs.graph(tuple(value.shape), value.dtype.itemsize, partials, company=company)
        readers = self._distinct(early)
        again = tuple(reader for reader in readers if self.decisions[reader.decision].repeatable)
        resting = phase == "forward" and self._nodes[names[0]].op == "placeholder"
        return Network(
            names[0], tuple(names), phase, producer, slot, readers, self._distinct(late), again, resting, graph
        )

    def _distinct(self, readers: tuple[tuple[Reader, int], ...]) -> tuple[Reader, ...]:
        """Drop readers whose demands are those of another one: several slots of one op often ask for the same."""
        out: list[Reader] = []
        for reader, _ in readers:
            demands = self.decisions[reader.decision].strategies.operands[:, reader.slot]
            twins = (
                other
                for other in out
                if other.decision == reader.decision
                and np.array_equal(demands, self.decisions[other.decision].strategies.operands[:, other.slot])
            )
            if next(twins, None) is None:
                out.append(reader)
        return tuple(out)

    def _tensors(self) -> dict[str, tuple[int, int, str]]:
        """Return every tensor's producer, result slot and phase, in graph order."""
        out = {}
        for role in self.program.inputs:
            out[role.node] = (self.tied[role.node], 0, "backward" if role.kind == "tangent" else "forward")
        for node in self.program.ops():
            slots = {index: slot for slot, (index, _) in enumerate(result_values(node))}
            if not has_many_results(node):
                if slots:
                    out[node.name] = (self.tied[node.name], 0, node.meta["phase"])
                continue
            for user in node.users:
                if is_getitem(user) and user.args[1] in slots:
                    out[user.name] = (self.tied[node.name], slots[user.args[1]], node.meta["phase"])  # type: ignore[index]
        return out

    def _readers(self) -> dict[str, tuple[Counter[Reader], Counter[Reader]]]:
        """Return the readers of every tensor in the forward and in the backward, with how often each."""
        out: dict[str, tuple[Counter[Reader], Counter[Reader]]] = defaultdict(lambda: (Counter(), Counter()))
        for node in self.program.ops():
            late = node.meta["phase"] == "backward"
            for slot, operand in enumerate(tensor_operands(node)):
                out[operand.name][late][Reader(self.tied[node.name], slot)] += 1
        for position, output in enumerate(self.program.outputs):
            if output.node is None:
                continue
            if output.kind == "gradient":
                out[output.node][True][Reader(self.tied[output.of], 0)] += 1
            else:
                out[output.node][False][Reader(self.tied[output_name(position)], 0)] += 1
        return out


def _merged(
    early: tuple[tuple[Reader, int], ...], late: tuple[tuple[Reader, int], ...]
) -> tuple[tuple[Reader, int], ...]:
    total: Counter[Reader] = Counter()
    for reader, count in early + late:
        total[reader] += count
    return tuple(sorted(total.items()))


def output_name(position: int) -> str:
    """Return the name of the decision where output ``position`` of a program lies."""
    return f"output {position}"


def build_problem(
    program: Program,
    prices: Prices,
    options: Options,
    folding: Folding,
    *,
    constraints: Constraints | None = None,
    drop_dominated: bool = True,
    repeated: Folding | None = None,
) -> Problem:
    """Return the split problem of an annotated program.

    Args:
        program: every op has ``meta["rule"]``.
        prices: mesh, device and links.
        options: what was asked.
        folding: which nodes decide together.
        constraints: what was asked of single nodes.
        drop_dominated: leave out strategies that no plan needs.
        repeated: the repeated blocks, which segments of recomputation follow; by default those of ``folding``.

    Raises:
        ConstraintError: a pinned layout that can't be, or a local batch that does not divide.
    """
    asked = constraints or NoConstraints()
    table, full_table = StrategyTable(prices, drop_dominated), StrategyTable(prices, drop_dominated=False)
    graphs = LayoutGraphs(prices)
    again = options.memory is not None and options.recompute
    segment_of = cut_segments(program, repeated or folding) if again else {}
    return _Builder(program, prices, options, folding, asked, graphs, table, full_table, segment_of).build()
