"""Price the regions of a model on the mesh inside a stage: the split ILP's answer, told apart by region."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch
from torch import fx

from autopar.mesh import Mesh
from autopar.plans import Options

from .annotate import annotate
from .apply_constraints import apply_constraints
from .cost.compute import is_view
from .cost.fusion import mark_traffic
from .find_regions import Span, find_regions, late_nodes, region_of
from .fold import fold
from .micro_batches import INDEX, varying
from .name_roles import name_roles
from .program import Program, is_random, result_values, tensor_operands
from .solve.decide import Decided, decide
from .solve.hiding import NO_HIDING
from .solve.layout_graph import Prices
from .solve.problem import Network, build_problem
from .solve.repeat_loops import repeat_loops
from .solve.travel import Travel

ATTENTION = ("autopar.attention", "autopar.attention_backward")
"""Ops of fused attention."""

Part = Literal["forward", "input", "weight", "once"]
SMALL = 1 / 64
"""A tensor below this part of the region's largest saved one is saved rather than computed again."""


@dataclass(frozen=True)
class Work:
    """Seconds on one rank, by what takes them: matrix products, attention, memory traffic, collectives."""

    products: float = 0.0
    attention: float = 0.0
    streams: float = 0.0
    moves: float = 0.0

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.products + self.attention + self.streams + self.moves

    def __add__(self, other: Work) -> Work:
        return Work(
            self.products + other.products,
            self.attention + other.attention,
            self.streams + other.streams,
            self.moves + other.moves,
        )

    def times(self, products: float, attention: float, streams: float, moves: float = 1.0) -> Work:
        """Return the work with each kind slowed by its own factor."""
        return Work(self.products * products, self.attention * attention, self.streams * streams, self.moves * moves)


@dataclass(frozen=True)
class PricedRegion:
    """What one region costs on one rank for one micro-batch, before data parallelism and recomputation.

    Attributes:
        name: of the region.
        kind: a number; regions of one kind are alike.
        forward, input, weight: the forward, the backward for inputs and the one for weights.
        again: what is done twice when all that is cheap to compute is not saved.
        parameters: ``(elements of the rank's piece, bytes of one, trained)`` of every parameter.
        saved_bytes: all that the backward reads.
        light_bytes: the same without what is cheap to compute again.
        input_bytes: what other regions made and this one reads.
        send_bytes: what crosses a cut behind it.
        once: what runs once a step, whatever the number of micro-batches; told apart only when it is asked for.
    """

    name: str
    kind: int
    forward: Work
    input: Work
    weight: Work
    again: Work
    parameters: tuple[tuple[int, int, bool], ...]
    saved_bytes: int
    light_bytes: int
    input_bytes: int
    send_bytes: int
    once: Work = Work()

    @property
    def numel(self) -> int:
        """Trained elements on a rank."""
        return sum(numel for numel, _, trained in self.parameters if trained)


def price_regions(program: Program, mesh: Mesh, options: Options, *, loops: bool = False) -> tuple[PricedRegion, ...]:
    """Return the priced regions of a program of one micro-batch, in model order.

    Regions of one kind (their ops decide together) get the mean of their prices, which their sum keeps.

    Args:
        program: captured with the batch of one micro-batch of one data-parallel rank.
        mesh: inside a stage, without the data axis.
        options: constraints and optimizer; the memory budget is left to the stages, and so is what hides.
        loops: decide for a whole step of the program's micro-batches, and tell apart what runs once in it.

    Raises:
        ConstraintError, MeshError: as ``make_plan``.
    """
    if any("rule" not in node.meta for node in program.ops()):
        annotate(program)
    prices = Prices.of(mesh)
    constraints = apply_constraints(program, mesh, options.constraints, name_roles(program))
    folding = fold(program, constraints.key)
    for node in program.ops():
        node.meta.pop("traffic", None)
    if prices.device.fuses:
        mark_traffic(program, folding.class_of)
    free = msgspec.structs.replace(options, memory=None)
    problem = build_problem(program, prices, free, folding, constraints=constraints)
    problem = repeat_loops(problem, program) if loops else problem
    pricing = Pricing(program, decide(dataclasses.replace(problem, hiding=NO_HIDING)), loops=loops)
    return _alike(pricing.regions(), [tuple(folding.class_of[name] for name in span.ops) for span in pricing.spans])


def repeat_regions(regions: Iterable[PricedRegion], counts: Mapping[str, int]) -> tuple[PricedRegion, ...]:
    """Return the regions with some of them repeated: ``counts`` gives the number of copies by name, 0 to leave one out.

    So a deep model is priced by a shallow one.
    """
    return tuple(region for region in regions for _ in range(counts.get(region.name, 1)))


def _alike(regions: list[PricedRegion], keys: list[tuple[str, ...]]) -> tuple[PricedRegion, ...]:
    kinds: dict[tuple[str, ...], list[PricedRegion]] = defaultdict(list)
    for region, key in zip(regions, keys, strict=True):
        kinds[key].append(region)
    means = {key: dataclasses.replace(_mean(kinds[key]), kind=number) for number, key in enumerate(kinds)}
    return tuple(
        dataclasses.replace(means[key], name=region.name, send_bytes=region.send_bytes)
        for region, key in zip(regions, keys, strict=True)
    )


def _mean(members: list[PricedRegion]) -> PricedRegion:
    share = 1.0 / len(members)

    def work(part: str) -> Work:
        total = Work()
        for member in members:
            total = total + getattr(member, part)
        return total.times(share, share, share, share)

    sizes = ("saved_bytes", "light_bytes", "input_bytes")
    most = {name: max(getattr(member, name) for member in members) for name in sizes}
    parts = {part: work(part) for part in ("forward", "input", "weight", "again", "once")}
    return dataclasses.replace(members[0], **parts, **most)  # type: ignore[arg-type]


class Pricing:
    """One decision taken apart.

    Args:
        program: of one micro-batch.
        decided: the decision.
        spans: the parts; regions by default.
        loops: the decision is one for a step (``repeat_loops``).
    """

    def __init__(
        self, program: Program, decided: Decided, spans: tuple[Span, ...] = (), *, loops: bool = False
    ) -> None:
        self.program, self.decided = program, decided
        self.problem = decided.problem
        self.nodes = program.nodes()
        self.spans = spans or find_regions(program)
        self.count = program.micro_batches if loops else 1
        moves = varying(program.graph, {INDEX: None}) if self.count > 1 else {}
        self.once = {node.name for node, each in moves.items() if not each}
        self.at = region_of(program, self.spans)
        self.late = late_nodes(program, self.at)
        self.learned = self._learned()
        self.travels: dict[tuple[str, str], tuple[Network, Travel]] = {}
        for network, travel in zip(self.problem.networks, decided.travels, strict=True):
            for name in network.members:
                self.travels[name, network.phase] = (network, travel)

    def _learned(self) -> set[str]:
        """Return the nodes that depend on a parameter or on random numbers: others any stage can make for itself."""
        out = {role.node for role in self.program.inputs if role.kind == "parameter"}
        for node in self.program.graph.nodes:
            if node.op == "call_function" and (
                is_random(node) or any(operand.name in out for operand in node.all_input_nodes)
            ):
                out.add(node.name)
        return out

    def part(self, name: str) -> Part:
        if name in self.once:
            return "once"
        if self.nodes[name].meta.get("phase") != "backward":
            return "forward"
        return "weight" if name in self.late else "input"

    def works(self) -> list[dict[Part, Work]]:
        """Return the seconds of every span, by when they are spent: those of one micro-batch, or of a step."""
        works: list[dict[Part, Work]] = [defaultdict(Work) for _ in self.spans]
        for node in self.program.ops():
            work, part = self.op_work(node), self.part(node.name)
            works[self.at[node.name]][part] += work
            if self.decided.again[self.problem.tied[node.name]]:
                works[self.at[node.name]]["once" if part == "once" else "input"] += work
        for (name, phase), (_, travel) in self.travels.items():
            for part, seconds in self._moves(name, phase, travel):
                works[self.at[name]][part] += Work(moves=seconds)
        return works

    def regions(self) -> list[PricedRegion]:
        works, sends = self.works(), self.sends()
        out = []
        for index, span in enumerate(self.spans):
            saved, light, again = self._saved(index)
            out.append(
                PricedRegion(
                    name=span.name,
                    kind=index,
                    forward=works[index]["forward"],
                    input=works[index]["input"],
                    weight=works[index]["weight"],
                    again=again,
                    parameters=self._parameters(index),
                    saved_bytes=saved,
                    light_bytes=min(light, saved),
                    input_bytes=self._input_bytes(index),
                    send_bytes=sends[index],
                    once=works[index]["once"],
                )
            )
        return out

    def op_work(self, node: fx.Node) -> Work:
        """Return the seconds of an op in one micro-batch, or in a step where it runs once."""
        decision = self.problem.decisions[self.problem.tied[node.name]]
        seconds = float(decision.strategies.seconds[self.decided.rows[self.problem.tied[node.name]]])
        seconds /= self.repeats(node.name)
        if str(getattr(node.target, "overloadpacket", node.target)) in ATTENTION:
            return Work(attention=seconds)
        return Work(products=seconds) if node.meta["rule"].flops else Work(streams=seconds)

    def repeats(self, name: str) -> int:
        """Return how often the decision counts what happens to a tensor."""
        return 1 if name in self.once else self.count

    def _moves(self, name: str, phase: str, travel: Travel) -> list[tuple[Part, float]]:
        network = self.travels[name, phase][0]
        early = sum(network.graph.seconds_between[arc] for arc in travel.early)
        late = sum(network.graph.seconds_between[arc] for arc in travel.late)
        if name in self.once:
            return [("once", early + late)]
        early, late = early / self.count, late / self.count
        first: Part = "forward" if phase == "forward" else "input"
        if self.nodes[name].op != "placeholder":
            first = self.part(name)
        return [(first, early), ("input", late)]

    def local_bytes(self, name: str) -> int:
        """Return the bytes of the smallest whole piece of a tensor that a rank has of it in the forward."""
        node = self.nodes[name]
        found = self.travels.get((name, "forward")) or self.travels.get((name, "backward"))
        value = node.meta.get("val")
        if found is None:
            return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
        network, travel = found
        had = [travel.source, *(target for _, target in travel.early)]
        whole = [at for at in had if network.graph.complete[at]] or had
        return min(int(network.graph.numel[at]) for at in whole) * network.graph.itemsize

    def _crossing(self) -> list[tuple[str, int, int]]:
        """Return every forward tensor that another region reads: its name, its region and the last that reads it."""
        out = []
        for node in self.program.graph.nodes:
            if node.op != "call_function" or node.meta.get("phase") != "forward" or node.name not in self.learned:
                continue
            if not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            readers = [self.at[user.name] for user in node.users if user.name in self.at]
            made = self.at[node.name]
            if readers and max(readers) > made:
                out.append((node.name, made, max(readers)))
        return out

    def sends(self) -> list[int]:
        out = [0] * len(self.spans)
        for name, made, read in self._crossing():
            for index in range(made, read):
                out[index] += self.local_bytes(name)
        return out

    def _input_bytes(self, index: int) -> int:
        readers = {name for name, made, _ in self._crossing() if made < index}
        return sum(
            self.local_bytes(name)
            for name in sorted(readers)
            if any(self.at.get(user.name) == index for user in self.nodes[name].users)
        )

    def _parameters(self, index: int) -> tuple[tuple[int, int, bool], ...]:
        out = []
        for role in self.program.inputs:
            if role.kind == "parameter" and self.at.get(role.node) == index:
                itemsize = self.nodes[role.node].meta["val"].element_size()
                out.append((self.local_bytes_at_rest(role.node) // itemsize, itemsize, role.requires_grad))
        return tuple(out)

    def local_bytes_at_rest(self, name: str) -> int:
        """Return the bytes of the piece in which a parameter rests."""
        found = self.travels.get((name, "forward")) or self.travels.get((name, "backward"))
        if found is None:
            value = self.nodes[name].meta["val"]
            return int(value.numel() * value.element_size())
        network, travel = found
        return int(network.graph.numel[travel.source]) * network.graph.itemsize

    def _saved(self, index: int) -> tuple[int, int, Work]:
        """Return the bytes that the backward reads, those of them that must be saved, and the work of the others."""
        read = [
            node.name
            for node in self.program.graph.nodes
            if node.op == "call_function"
            and node.meta.get("phase") == "forward"
            and self.at[node.name] == index
            and isinstance(node.meta.get("val"), torch.Tensor)
            and any(user.meta.get("phase") == "backward" for user in node.users)
        ]
        whole = dict.fromkeys(self._base(name) for name in read)
        sizes = {name: self.local_bytes(name) for name in whole if self.at.get(name) == index}
        small = SMALL * max(sizes.values(), default=0)
        light: dict[str, int] = {}
        redone: dict[str, None] = {}
        waiting = list(sizes)
        while waiting:
            name = waiting.pop()
            if name in light or name in redone or self.at.get(name) != index:
                continue
            node = self.nodes[name]
            size = self.local_bytes(name)
            if node.op == "placeholder":
                continue
            if size <= small or not self._cheap(node):
                light[name] = size
                continue
            redone[name] = None
            waiting += [self._base(operand.name) for operand in tensor_operands(node)]
        again = Work()
        for name in redone:
            again += self.op_work(self.nodes[name])
        inside = sum(sizes.values())
        edge = self._input_bytes(index)
        return inside + edge, sum(light.values()) + edge, again

    def _base(self, name: str) -> str:
        """Return the tensor that a view looks at."""
        node = self.nodes[name]
        while node.op == "call_function" and is_view(node.target) and tensor_operands(node):
            node = tensor_operands(node)[0]
        return node.name

    def _cheap(self, node: fx.Node) -> bool:
        """Tell whether an op is bound by memory traffic and has one result that can be made again."""
        rule = node.meta.get("rule")
        return rule is not None and not rule.flops and not is_random(node) and len(result_values(node)) == 1
