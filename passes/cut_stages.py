"""Cut a lowered program into what each stage runs, and when: before, in and after the loop over micro-batches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.errors import LoweringError

from .add_to_sums import add_to_sums
from .local_program import LocalProgram
from .micro_batches import INDEX, completes
from .place_nodes import Placing, place_nodes
from .program import has_many_results, is_getitem, is_random, touches_generator
from .rules.micro_batches import JOIN
from .split_phases import GraphOnly
from .stage_pieces import (
    ADDING,
    BACKWARD,
    BEGIN,
    COMPLETE,
    END,
    FORWARD,
    TURN,
    WEIGHT,
    WHEN,
    Draw,
    Segment,
    StagedProgram,
    StagePieces,
    Total,
)

_DOWN = {BEGIN: BEGIN, FORWARD: FORWARD, COMPLETE: COMPLETE}
"""When a value runs -> when it travels to a later stage."""

_UP = {BEGIN: TURN, FORWARD: BACKWARD, COMPLETE: TURN, TURN: TURN, BACKWARD: BACKWARD, END: END}
"""When a value runs -> when it travels to an earlier stage."""


def cut_stages(
    local: LocalProgram,
    stages: Mapping[str, int],
    num_stages: int,
    num_micro_batches: int,
    *,
    again: Collection[fx.Node] = (),
    split_backward: bool = False,
    callable_segments: bool = True,
) -> StagedProgram:
    """Return a lowered program cut into stages and, in each, into segments that run once or once a micro-batch.

    A value that a stage further on reads passes through all stages between. A parameter that several stages read
    belongs to the first of them: its value travels on before the micro-batches, its gradient comes back after them.

    Args:
        local: of a program that ``micro_batches`` made (any program, for one micro-batch).
        stages: forward op of the global program -> stage (``assign_stages``).
        again: nodes that run once a micro-batch though they could run once (``gathers_again``).
        split_backward: cut the backward into the part that earlier stages wait for, and ``weight``.
        callable_segments: generate code; otherwise the segments are to be interpreted.

    Raises:
        LoweringError: the cuts make a value travel against the order of the stages.
    """
    placing = place_nodes(
        local.joint.graph, local.inputs, local.outputs, stages, num_stages, again, once=num_micro_batches == 1
    )
    return _Cutter(local, placing, num_stages, num_micro_batches, split_backward, callable_segments).run()


@dataclass
class _Traffic:
    """What one stage takes from its neighbours, when."""

    down: dict[str, dict[str, None]] = field(default_factory=dict)
    up: dict[str, dict[str, None]] = field(default_factory=dict)


class _Cutter:
    def __init__(
        self,
        local: LocalProgram,
        placing: Placing,
        num_stages: int,
        num_micro_batches: int,
        split_backward: bool,
        callable_segments: bool,
    ) -> None:
        self.local, self.placing, self.num_stages = local, placing, num_stages
        self.num_micro_batches, self.split_backward = num_micro_batches, split_backward
        self.make: type[fx.GraphModule] = fx.GraphModule if callable_segments else GraphOnly
        self.nodes = list(local.joint.graph.nodes)[:-1]
        self.by_name = {node.name: node for node in self.nodes}
        self.ends = list(local.joint.graph.output_node().args[0])  # type: ignore[arg-type]
        self.needs: dict[fx.Node, set[int]] = {node: set() for node in self.nodes}
        self.at: dict[fx.Node, set[int]] = {}
        self.traffic = [_Traffic() for _ in range(num_stages)]
        self.output_stage: list[int | None] = []

    def run(self) -> StagedProgram:
        self.find_outputs()
        self.find_needs()
        self.send()
        pieces = tuple(self.piece(stage) for stage in range(self.num_stages))
        drawing = [node for node in self.nodes if node.op == "call_function" and is_random(node)]
        draws = tuple(self.draw(node) for node in drawing if not node.meta.get("again"))
        sides = [side for traffic in self.traffic for side in (traffic.down, traffic.up)]
        travelling = {name for side in sides for names in side.values() for name in names}
        return StagedProgram(
            stages=pieces,
            inputs=self.local.inputs,
            outputs=self.local.outputs,
            output_stage=tuple(self.output_stage),
            num_micro_batches=self.num_micro_batches,
            barrier=self.placing.barrier,
            draws=draws,
            travelling={name: self.by_name[name].meta["val"] for name in sorted(travelling)},
        )

    def draw(self, node: fx.Node) -> Draw:
        if node.meta.get("phase") == "backward" and not node.meta.get("again"):
            raise LoweringError(f"{node.name} draws random numbers in the backward, which micro-batches can't repeat")
        read = [source for source in node.all_input_nodes if source.name != INDEX]
        if read and self.num_stages > 1:
            raise LoweringError(
                f"{node.name} ({node.target}) draws numbers beside the tensor {read[0].name}, so that other stages "
                "can't draw the same; use dropout, or one stage"
            )
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda source: None)
        return Draw(self.placing.stage[node], node.target, tuple(args), kwargs)

    def find_outputs(self) -> None:
        """Find the stage that has each output; a gradient is wanted where its parameter is kept."""
        for role, end in zip(self.local.outputs, self.ends, strict=True):
            if not isinstance(end, fx.Node):
                self.output_stage.append(None)
                continue
            if self.placing.when.get(end) in (FORWARD, BACKWARD) and end.op != "placeholder":
                raise LoweringError(f"the output {role.name} is {end.name}, a value of one micro-batch")
            stage = self.placing.stage.get(end, self.num_stages - 1)
            if role.kind == "gradient":
                stage = self.placing.stage.get(self.by_name[role.of], stage)
            self.output_stage.append(stage)
            self.needs[end].add(stage)

    def find_needs(self) -> None:
        """Find at which stages every node is read, and at which it is computed."""
        for node in reversed(self.nodes):
            if node in self.placing.free:
                places = set(self.needs[node])
            else:
                places = {self.placing.stage[node]}
            self.at[node] = places
            for source in node.all_input_nodes:
                self.needs[source] |= places

    def send(self) -> None:
        for node in self.nodes:
            if node in self.placing.free:
                continue
            home = self.placing.stage[node]
            others = self.needs[node] - {home}
            if others and (has_many_results(node) or not isinstance(node.meta.get("val"), torch.Tensor)):
                raise LoweringError(f"{node.name} is no tensor, and can't travel from stage {home} to {sorted(others)}")
            when = self.placing.when[node]
            for stage in range(home + 1, max(others, default=home) + 1):
                if when not in _DOWN:
                    raise LoweringError(f"the backward value {node.name} of stage {home} is read by stage {stage}")
                self.traffic[stage].down.setdefault(_DOWN[when], {})[node.name] = None
            for stage in range(min(others, default=home), home):
                self.traffic[stage].up.setdefault(_UP[when], {})[node.name] = None

    def piece(self, stage: int) -> StagePieces:
        own = [node for node in self.nodes if stage in self.at[node]]
        parts: dict[str, list[fx.Node]] = {when: [] for when in (*WHEN, WEIGHT)}
        for node in own:
            if node.op != "placeholder" and not completes(node):
                parts[self.placing.when[node]].append(node)
        if self.split_backward:
            parts[BACKWARD], parts[WEIGHT] = self.split(stage, parts[BACKWARD])
        wanted = self.wanted(stage, own, parts)
        segments = {when: self.segment(when, nodes, wanted) for when, nodes in parts.items() if nodes}
        totals = tuple(_total(node) for node in own if completes(node))
        self.add_forms(segments, totals, wanted)
        owned = [
            node.name
            for node in own
            if node.op == "placeholder" and node not in self.placing.free and self.placing.stage[node] == stage
        ]
        return StagePieces(
            index=stage,
            segments=segments,
            totals=totals,
            down={when: tuple(names) for when, names in self.traffic[stage].down.items()},
            up={when: tuple(names) for when, names in self.traffic[stage].up.items()},
            placeholders=tuple(node.name for node in own if node.op == "placeholder"),
            owns=tuple(owned),
            ends=tuple(
                end.name
                for end, place in zip(self.ends, self.output_stage)
                if isinstance(end, fx.Node) and place == stage
            ),
        )

    def add_forms(
        self, segments: dict[str, Segment], totals: Sequence[Total], wanted: Mapping[fx.Node, set[str]]
    ) -> None:
        """Add the forms of the backward that run from the second micro-batch on."""
        if self.num_micro_batches == 1:
            return
        others = {total.part for total in totals if total.op != "sum"}
        for when, name in ADDING.items():
            if when in segments:
                segment = segments[when]
                read = {part for part in segment.gives if wanted[self.by_name[part]] - {when, "total"}}
                adding = add_to_sums(segment, totals, read | others, self.make)
                if adding is not None:
                    segments[name] = adding

    def split(self, stage: int, nodes: list[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return the backward nodes that earlier stages wait for, and the rest."""
        waited = {self.by_name[name] for traffic in self.traffic[:stage] for name in traffic.up.get(BACKWARD, {})}
        inside = set(nodes)
        for node in reversed(nodes):
            if node in waited or touches_generator(node):
                waited.add(node)
            if node in waited:
                waited.update(source for source in node.all_input_nodes if source in inside)
        first = [node for node in nodes if node in waited or (is_getitem(node) and node.args[0] in waited)]
        chosen = set(first)
        return first, [node for node in nodes if node not in chosen]

    def wanted(self, stage: int, own: Iterable[fx.Node], parts: Mapping[str, list[fx.Node]]) -> dict[fx.Node, set[str]]:
        """Return, for every value, the segments (and others) of this stage that read it."""
        segment_of = {node: when for when, nodes in parts.items() for node in nodes}
        out: dict[fx.Node, set[str]] = {}
        for node in own:
            reader = segment_of.get(node, "total")
            for source in node.all_input_nodes:
                out.setdefault(source, set()).add(reader)
        for end, place in zip(self.ends, self.output_stage):
            if isinstance(end, fx.Node) and place == stage:
                out.setdefault(end, set()).add("output")
        for neighbour, side in ((stage + 1, "down"), (stage - 1, "up")):
            if 0 <= neighbour < self.num_stages:
                for names in getattr(self.traffic[neighbour], side).values():
                    for name in names:
                        out.setdefault(self.by_name[name], set()).add("message")
        return out

    def segment(self, when: str, nodes: list[fx.Node], wanted: Mapping[fx.Node, set[str]]) -> Segment:
        graph = fx.Graph()
        inside = set(nodes)
        takes: dict[fx.Node, None] = {}
        for node in nodes:
            for source in node.all_input_nodes:
                if source not in inside and source.op != "get_attr":
                    takes[source] = None
        env: dict[fx.Node, fx.Node] = {}
        for source in takes:
            env[source] = graph.placeholder(source.name)
            env[source].meta = dict(source.meta)
        constants = {s for n in nodes for s in n.all_input_nodes if s.op == "get_attr" and s not in inside}
        for node in [node for node in self.nodes if node in constants] + nodes:
            env[node] = graph.node_copy(node, env.__getitem__)
        gives = [node for node in nodes if node.op != "get_attr" and wanted.get(node, set()) - {when}]
        graph.output(tuple(env[node] for node in gives))
        return Segment(
            self.make(self.local.joint, graph), tuple(node.name for node in takes), tuple(node.name for node in gives)
        )


def _total(node: fx.Node) -> Total:
    part = node.args[0]
    assert isinstance(part, fx.Node)
    when = BACKWARD if node.meta.get("phase") == "backward" else FORWARD
    if node.target is JOIN:
        return Total(node.name, part.name, when, "join", int(str(node.args[1])))
    return Total(node.name, part.name, when, str(node.args[1]))
