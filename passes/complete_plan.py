"""Make a full plan out of any legal choice of strategies: routes, saved tensors and outputs are filled in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import fx

from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.describe_plan import describe_plan
from autopar.passes.insert_collectives import arc_bytes
from autopar.passes.lower_rank import BACKWARD, FORWARD
from autopar.passes.plan_choices import choices_of
from autopar.passes.program import Input, Output, Program, is_getitem, result_values, tensor_operands
from autopar.passes.redistribution import Arc, route
from autopar.passes.rules.legality import operand_layouts, result_layouts
from autopar.placement import REPLICATE, Layout, is_partial, layout_name
from autopar.plans import CollectiveRow, Cost, MemoryTable, MeshRecord, Options, Plan, Route, SolverReport

Price = Callable[[fx.Node, Arc], float]
PickSaved = Callable[[str, Sequence[Layout]], Sequence[Layout]]


def complete_plan(
    program: Program,
    mesh: Mesh,
    choices: Mapping[str, Sequence[str]],
    parameter_layouts: Mapping[str, Layout],
    *,
    price: Price | None = None,
    options: Options | None = None,
    pick_saved: PickSaved | None = None,
    recomputed: Collection[str] = (),
) -> Plan:
    """Return a plan that runs ``program`` under ``choices``, every tensor travelling the cheapest way to who wants it.

    Args:
        choices: op node -> name of its choice on each axis; an op that is not listed is replicated.
        parameter_layouts: full name -> where a parameter rests; one that is not listed is replicated.
        price: cost of an arc for a tensor; by default the bytes that a rank hands in.
        pick_saved: given a forward tensor that the backward reads and the layouts it had in the forward (the first is
            its producer's), returns those to keep; by default the producer's. Placeholders need none.
        recomputed: forward ops that the backward computes again instead of starting from what was saved.

    Raises:
        PlanError: ``parameter_layouts`` names something that is no parameter.
        LoweringError: an unknown or illegal choice, or one that wants a partial value which nobody produces.
    """
    if any("rule" not in node.meta for node in program.ops()):
        annotate(program)
    names = {role.name for role in program.inputs if role.kind in ("parameter", "buffer")}
    unknown = sorted(set(parameter_layouts) - names)
    if unknown:
        raise PlanError(f"{unknown[0]} is no parameter of the program; it has {', '.join(sorted(names))}")
    plan = _Completion(
        program, mesh, choices, parameter_layouts, price, options or Options(), pick_saved, recomputed
    ).run()
    return describe_plan(program, plan)


class _Completion:
    """The layouts that every tensor has in each phase, and the arcs that took it there."""

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        choices: Mapping[str, Sequence[str]],
        parameter_layouts: Mapping[str, Layout],
        price: Price | None,
        options: Options,
        pick_saved: PickSaved | None,
        recomputed: Collection[str],
    ) -> None:
        self.program, self.mesh, self.options = program, mesh, options
        self.price: Price = price or self.bytes_price
        self.pick_saved: PickSaved = pick_saved or (lambda name, had: had[:1])
        self.whole = (REPLICATE,) * mesh.num_axes
        self.globals = program.nodes()
        self.choices = {
            node.name: tuple(choices.get(node.name, ("replicate",) * mesh.num_axes)) for node in program.ops()
        }
        self.rests = {
            role.node: self.rest(role, parameter_layouts) for role in program.inputs if role.kind != "tangent"
        }
        self.again = _needed_again(program, recomputed)
        self.had: dict[tuple[str, str], list[Layout]] = {}
        self.arcs: dict[tuple[str, str], list[Arc]] = {}
        self.saved: dict[str, tuple[Layout, ...]] = {}
        self.outputs: dict[str, Layout] = {}

    def bytes_price(self, tensor: fx.Node, arc: Arc) -> float:
        value: torch.Tensor = tensor.meta["val"]
        return float(arc_bytes(tuple(value.shape), value.element_size(), arc, self.mesh.sizes))

    def rest(self, role: Input, parameter_layouts: Mapping[str, Layout]) -> Layout:
        if role.kind == "input":
            value = self.globals[role.node].meta.get("val")
            if self.options.inputs == "local" and isinstance(value, torch.Tensor) and value.dim():
                return (0, *self.whole[1:])
            return self.whole
        return tuple(parameter_layouts.get(role.name, self.whole))

    def run(self) -> Plan:
        for name, layout in self.rests.items():
            self.had[name, FORWARD] = [layout]
        self.sweep(FORWARD)
        for result in self.program.outputs:
            if result.kind != "gradient" and result.node is not None:
                self.want(self.globals[result.node], FORWARD, self.output_layout(result))
        for role in self.program.inputs:
            if role.kind == "tangent":
                self.had[role.node, BACKWARD] = [self.outputs.get(role.name, self.whole)]
        self.keep()
        self.sweep(BACKWARD)
        for node, layout in self.gradients():
            self.want(node, BACKWARD, layout)
        return self.plan()

    def ops(self, phase: str) -> list[fx.Node]:
        """Return what runs in a phase, in order; what is computed again stands before the backward's own ops."""
        own = [node for node in self.program.ops() if node.meta["phase"] == phase]
        return self.again + own if phase == BACKWARD else own

    def is_again(self, name: str) -> bool:
        """Tell whether a tensor is computed again."""
        node = self.globals[name]
        return (node.args[0] if is_getitem(node) else node) in self.again

    def gradients(self) -> list[tuple[fx.Node, Layout]]:
        roles = [role for role in self.program.outputs if role.kind == "gradient" and role.node is not None]
        return [(self.globals[str(role.node)], self.rests[role.of]) for role in roles]

    def sweep(self, phase: str) -> None:
        for node in self.ops(phase):
            choices = choices_of(node, self.choices[node.name], self.mesh)
            for operand, layout in zip(tensor_operands(node), operand_layouts(choices)):
                self.want(operand, phase, layout)
            layouts = dict(zip((index for index, _ in result_values(node)), result_layouts(choices)))
            if isinstance(node.meta.get("val"), torch.Tensor):
                self.had[node.name, phase] = [layouts[0]]
            for user in node.users:
                if is_getitem(user) and user.args[1] in layouts:
                    self.had[user.name, phase] = [layouts[user.args[1]]]  # type: ignore[index]

    def want(self, tensor: fx.Node, phase: str, layout: Layout) -> None:
        had = self.had.setdefault((tensor.name, phase), [])
        shape = tuple(tensor.meta["val"].shape)
        path = route(shape, self.mesh.sizes, had, layout, lambda arc: self.price(tensor, arc))
        self.arcs.setdefault((tensor.name, phase), []).extend(path)
        had.extend(arc.target for arc in path)

    def output_layout(self, role: Output) -> Layout:
        if role.kind == "buffer":
            return self.rests[role.of]
        asked = self.options.outputs
        lie = asked == "lie" or (asked == "auto" and self.program.loss is not None and role.index != self.program.loss)
        first = self.had[str(role.node), FORWARD][0]
        layout = tuple(REPLICATE if is_partial(code) else code for code in first) if lie else self.whole
        return self.outputs.setdefault(role.name, layout)

    def keep(self) -> None:
        """Choose what the backward starts from: every forward tensor that it reads is saved in some layout."""
        wanted: dict[str, list[Layout]] = {}
        for node in self.ops(BACKWARD):
            choices = choices_of(node, self.choices[node.name], self.mesh)
            for operand, layout in zip(tensor_operands(node), operand_layouts(choices)):
                wanted.setdefault(operand.name, []).append(layout)
        for end, layout in self.gradients():
            wanted.setdefault(end.name, []).append(layout)
        for name, layouts in wanted.items():
            had = self.had.get((name, FORWARD))
            if had is None or self.is_again(name):
                continue
            starts = [self.rests[name]] if name in self.rests else []
            kept = [layout for layout in dict.fromkeys(self.pick_saved(name, had)) if layout not in starts]
            if not all(_leads_to(kept + starts, layout) for layout in layouts):
                kept.insert(0, had[0])
            if kept:
                self.saved[name] = tuple(kept)
            self.had[name, BACKWARD] = kept + starts

    def plan(self) -> Plan:
        roles = self.program.inputs
        routes = [
            Route(tensor=name, phase=phase, arcs=tuple((layout_name(a.source), layout_name(a.target)) for a in arcs))
            for (name, phase), arcs in self.arcs.items()
            if arcs
        ]
        mesh = self.mesh
        return Plan(
            fingerprint=self.program.fingerprint(),
            mesh_record=MeshRecord(sizes=mesh.sizes, names=mesh.names, device=mesh.device, links=mesh.links),
            options=self.options,
            choices=self.choices,
            parameters={r.name: layout_name(self.rests[r.node]) for r in roles if r.kind in ("parameter", "buffer")},
            inputs={r.name: layout_name(self.rests[r.node]) for r in roles if r.kind == "input"},
            outputs={name: layout_name(layout) for name, layout in self.outputs.items()},
            routes=tuple(routes),
            saved={name: tuple(map(layout_name, layouts)) for name, layouts in self.saved.items()},
            recomputed=tuple(node.name for node in self.again),
            cost=Cost(step_seconds=0.0, compute_seconds=0.0, communication_seconds=0.0),
            memory=MemoryTable(
                parameters_bytes=0, gradients_bytes=0, optimizer_bytes=0, buffers_bytes=0, saved_bytes=0, total_bytes=0
            ),
            collectives=tuple(self.rows()),
            solver=SolverReport(
                status="given", objective_s=0.0, bound_s=0.0, gap=0.0, seconds=0.0, variables=0, constraints=0
            ),
        )

    def rows(self) -> list[CollectiveRow]:
        return [
            CollectiveRow(
                kind=arc.kind,
                axis=arc.axis,
                tensor=name,
                phase=phase,
                bytes=int(self.bytes_price(self.globals[name], arc)),
                seconds=0.0,
            )
            for (name, phase), arcs in self.arcs.items()
            for arc in arcs
            if arc.kind != "slice"
        ]


def _needed_again(program: Program, recomputed: Collection[str]) -> list[fx.Node]:
    """Return the forward ops of ``recomputed`` that the backward needs, for itself or for others computed again."""
    ends = {role.node for role in program.outputs if role.kind == "gradient"}
    found: list[fx.Node] = []
    for node in reversed(list(program.ops())):
        if node.name not in recomputed or node.meta["phase"] != FORWARD:
            continue
        results = [node, *(user for user in node.users if is_getitem(user))]
        readers = [user for result in results for user in result.users if user.op != "output" and not is_getitem(user)]
        late = any(reader.meta["phase"] == BACKWARD or reader in found for reader in readers)
        if late or any(result.name in ends for result in results):
            found.append(node)
    return found[::-1]


def _leads_to(starts: Sequence[Layout], target: Layout) -> bool:
    """Tell whether some start has every partial placement of ``target``: nothing leads to a partial value."""
    return any(all(a == b or not is_partial(b) for a, b in zip(start, target)) for start in starts)
