"""Rewrite a program into the program of one rank: local shapes, collectives once for each tensor, phase and layout."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.errors import LoweringError
from autopar.mesh import Coordinate
from autopar.passes.insert_collectives import insert_arc
from autopar.passes.local_ops import local_op
from autopar.passes.local_program import LocalProgram
from autopar.passes.order_again import order_again
from autopar.passes.plan_choices import choices_of, input_layout
from autopar.passes.program import (
    Input,
    Output,
    Program,
    has_many_results,
    is_getitem,
    is_random,
    result_values,
    tensor_operands,
    tensors_of,
)
from autopar.passes.reasons import move_reason, reader_text
from autopar.passes.redistribution import Arc, arc_between
from autopar.passes.rules.legality import operand_layouts, result_layouts
from autopar.passes.rules.rule import Choice, LocalCall, Piece, Rule
from autopar.passes.split_phases import GraphOnly, split_phases
from autopar.placement import Layout, layout_name, local_range, local_shape, parse_layout
from autopar.plans import Plan

FORWARD, BACKWARD = "forward", "backward"


@dataclass
class Reader:
    """Who wants a tensor, for the reason of a collective."""

    name: str
    module: str
    source: str


class Lowering:
    """The state of one rewrite: which layouts of every tensor are there, in each phase."""

    library_op = staticmethod(local_op)
    """Chooses the op that carries an op out; a subclass whose result is a program again keeps every op."""

    def __init__(self, program: Program, plan: Plan, coordinate: Coordinate, device: torch.device | None) -> None:
        self.program, self.plan, self.coordinate, self.device = program, plan, tuple(coordinate), device
        self.mesh = plan.mesh
        self.graph = fx.Graph()
        self.there: dict[tuple[str, str], dict[Layout, fx.Node]] = {}
        self.scalars: dict[fx.Node, Any] = {}
        self.tuples: dict[fx.Node, tuple[Any, dict[int, Layout]]] = {}
        self.globals = program.nodes()
        self.ends: list[Any] = [role.constant for role in program.outputs]
        self.end_layouts: list[Layout | None] = [None for _ in program.outputs]
        self.routes = {
            (route.tensor, route.phase): {
                parse_layout(target): (index, parse_layout(source))
                for index, (source, target) in reversed(list(enumerate(route.arcs)))
            }
            for route in plan.routes
        }
        self.saved = {name: tuple(map(parse_layout, layouts)) for name, layouts in plan.saved.items()}
        self.outputs_of: dict[str, list[int]] = {}
        for index, role in enumerate(program.outputs):
            self.outputs_of.setdefault(role.node or "", []).append(index)
        self.again = set(plan.recomputed)
        self.states: dict[str, fx.Node] = {}
        self.layouts: dict[str, Layout] = {}
        unknown = sorted(self.again - self.globals.keys())
        if unknown:
            raise LoweringError(f"the plan computes {unknown[0]} again, which the program does not compute")

    def joint(self) -> fx.GraphModule:
        """Lower placeholders, the forward, what it saves, the backward, and the outputs."""
        self.layouts = {role.node: self.placeholder(role) for role in self.program.inputs}
        for phase in (FORWARD, BACKWARD):
            for node in self.program.graph.nodes:
                if node.op not in ("placeholder", "output") and self.phase(node) == phase:
                    self.lower_node(node, phase)
                    if phase == BACKWARD:
                        self.lower_outputs(phase, node.name)
            if phase == FORWARD:
                self.save()
            self.lower_outputs(phase)
        self.graph.output(tuple(self.ends))
        return GraphOnly(self.program.graph_module, self.graph)

    def local_program(self, joint: fx.GraphModule, callable_halves: bool) -> LocalProgram:
        """Cut the joint graph into its halves."""
        forward, backward, num_saved = split_phases(
            joint, self.program.inputs, self.program.outputs, callable_halves=callable_halves
        )
        roles = self.program.inputs, self.program.outputs
        layouts = self.layouts, tuple(self.end_layouts)
        return LocalProgram(joint, forward, backward, *roles, *layouts, num_saved, self.mesh, self.coordinate)

    def phase(self, node: fx.Node) -> str:
        """Return the phase of a node; a result belongs to the phase of the op that computes it."""
        owner = node.args[0] if is_getitem(node) and isinstance(node.args[0], fx.Node) else node
        return str(owner.meta["phase"])

    def placeholder(self, role: Input) -> Layout:
        layout = input_layout(role, self.plan)
        origin = self.globals[role.node]
        phase = BACKWARD if role.kind == "tangent" else FORWARD
        node = self.graph.placeholder(role.node)
        value = origin.meta.get("val")
        if isinstance(value, torch.Tensor):
            node.meta.update(self.meta(origin, phase), val=self.piece(value, layout))
            for each in (FORWARD, BACKWARD):
                self.hold(origin, layout, node, each)
        else:
            self.scalars[origin] = node
            node.meta.update(self.meta(origin, phase), val=value)
        return layout

    def meta(self, origin: fx.Node, phase: str) -> dict[str, Any]:
        meta = origin.meta
        return {
            "phase": phase,
            "module": meta.get("module", ""),
            "source": meta.get("source", ""),
            "origin": origin.name,
            **({"forward_node": meta["forward_node"]} if "forward_node" in meta else {}),
        }

    def piece(self, value: torch.Tensor, layout: Layout) -> torch.Tensor:
        shape = local_shape(value.shape, layout, self.mesh.sizes, self.coordinate)
        return torch.empty(shape, dtype=value.dtype, device="meta")

    def hold(self, tensor: fx.Node, layout: Layout, node: fx.Node, phase: str) -> None:
        self.there.setdefault((tensor.name, phase), {})[layout] = node
        node.meta.update(tensor=tensor.name, layout=layout)

    def save(self) -> None:
        """Make sure that every saved layout is there at the end of the forward, and open the backward with it."""
        for name, layouts in self.saved.items():
            tensor = self.globals.get(name)
            if tensor is None:
                raise LoweringError(f"the plan saves {name}, which the program does not compute")
            for layout in layouts:
                kept = self.version(tensor, layout, FORWARD, Reader("the backward", "", ""))
                self.there.setdefault((name, BACKWARD), {})[layout] = kept

    def version(self, tensor: fx.Node, layout: Layout, phase: str, reader: Reader) -> fx.Node:
        """Return the node that holds ``tensor`` in ``layout``, moving it along its route where it is not there yet."""
        for op in order_again(tensor, self.again) if phase == BACKWARD else ():
            self.compute_again(op)
        there = self.there.setdefault((tensor.name, phase), {})
        if layout in there:
            return there[layout]
        arcs = self.routes.get((tensor.name, phase), {})
        pending: list[tuple[int, Layout, Layout]] = []
        target = layout
        while target not in there:
            index, source = arcs.get(target, (-1, target))
            if index < 0 or (pending and index >= pending[-1][0]):
                has = ", ".join(map(layout_name, sorted(there))) or "nothing"
                raise LoweringError(
                    f"{reader.name} wants {tensor.name} in {layout_name(layout)} in the {phase}; there is {has}, "
                    f"and the plan's routes do not lead to {layout_name(target)}"
                )
            pending.append((index, source, target))
            target = source
        for _, source, end in reversed(pending):
            arc = arc_between(source, end)
            if arc is None:
                raise LoweringError(
                    f"the route of {tensor.name} goes from {layout_name(source)} to {layout_name(end)}: no single arc"
                )
            self.hold(tensor, end, self.move(tensor, there[source], arc, phase, reader), phase)
        return there[layout]

    def compute_again(self, op: fx.Node) -> None:
        """Emit once more, in the backward, an op whose operands are there."""
        self.again.remove(op.name)
        before = next(iter(reversed(self.graph.nodes)))
        now = None
        if op.name in self.states:
            device = self.states[op.name].args[0]
            now = self.random_op(op, torch.ops.autopar.random_state.default, (device,), BACKWARD)
            self.random_op(op, torch.ops.autopar.set_random_state.default, (self.states[op.name], device), BACKWARD)
        self.lower_op(op, BACKWARD)
        if now is not None:
            self.random_op(op, torch.ops.autopar.set_random_state.default, (now, device), BACKWARD)
        for user in op.users:
            if is_getitem(user):
                self.lower_getitem(user, BACKWARD)
        while before.next.op != "root":
            before = before.next
            if before.meta["origin"] == op.name or self.globals[before.meta["origin"]] in op.users:
                before.meta["again"] = True

    def random_op(self, op: fx.Node, target: Any, args: tuple[Any, ...], phase: str) -> fx.Node:
        """Emit the reading or setting of the random state around an op that draws."""
        made = self.graph.create_node("call_function", target, args)
        made.meta.update(self.meta(op, phase), val=_run_on_meta(made) if "set" not in str(target) else None)
        return made

    def move(self, tensor: fx.Node, node: fx.Node, arc: Arc, phase: str, reader: Reader) -> fx.Node:
        value: torch.Tensor = tensor.meta["val"]
        meta = {
            "phase": phase,
            "module": reader.module,
            "source": reader.source,
            "origin": tensor.name,
            "arc": arc.kind,
            "reason": move_reason(arc, self.mesh, reader.name),
        }

        def emit(target: Any, args: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
            name = f"{tensor.name}_{arc.kind}" if "_c10d" in str(target) and "wait" not in str(target) else None
            made = self.graph.create_node("call_function", target, args, name=name)
            made.meta.update(meta, val=torch.empty(shape, dtype=dtype, device="meta"))
            return made

        moved: fx.Node = insert_arc(arc, node, tuple(value.shape), value.dtype, self.mesh.sizes, self.coordinate, emit)
        if arc.kind == "slice" and phase == FORWARD and arc.target in self.saved.get(tensor.name, ()):
            moved = emit(torch.ops.aten.clone.default, (moved,), tuple(moved.meta["val"].shape), value.dtype)
        return moved

    def lower_node(self, node: fx.Node, phase: str) -> None:
        if is_getitem(node):
            self.lower_getitem(node, phase)
            return
        if node.name in self.again and is_random(node) and phase == FORWARD:
            device = self.device or tensors_of(node)[0].device
            read = torch.ops.autopar.random_state.default
            self.states[node.name] = self.random_op(node, read, (device,), phase)
        self.lower_op(node, phase)

    def lower_op(self, node: fx.Node, phase: str) -> None:
        names = self.plan.choices.get(node.name)
        if names is None:
            raise LoweringError(f"the plan has no choice for {node.name} ({node.target})")
        choices = choices_of(node, names, self.mesh)
        results = result_layouts(choices)
        values = result_values(node)
        if node.op == "get_attr":
            handle: Any = self.graph.get_attr(str(node.target))
            handle.meta.update(self.meta(node, phase), val=node.meta.get("val"))
        else:
            handle = self.emit_op(node, choices, phase)
        if has_many_results(node):
            self.tuples[node] = (handle, {index: layout for (index, _), layout in zip(values, results)})
        elif values:
            self.hold(node, results[0], handle, phase)
        else:
            self.scalars[node] = handle

    def lower_getitem(self, node: fx.Node, phase: str) -> None:
        owner, index = node.args
        assert isinstance(owner, fx.Node) and isinstance(index, int)
        handle, layouts = self.tuples[owner]
        value = node.meta.get("val")
        if isinstance(handle, (tuple, list)):
            made = handle[index]
        else:
            made = self.graph.create_node("call_function", operator.getitem, (handle, index), name=node.name)
            made.meta.update(self.meta(node, phase), val=value)
        if isinstance(value, torch.Tensor):
            made.meta.update(val=self.piece(value, layouts[index]))
            self.hold(node, layouts[index], made, phase)
        else:
            self.scalars[node] = made

    def emit_op(self, node: fx.Node, choices: tuple[Choice, ...], phase: str) -> Any:
        """Emit an op for this rank through its rule's ``localize``; return its handle or one handle a result."""
        rule: Rule = node.meta["rule"]
        args, kwargs = self.local_arguments(node, choices, phase)
        made: list[fx.Node] = []

        def emit(target: Any, *emit_args: Any, **emit_kwargs: Any) -> fx.Node:
            target, emit_args = self.library_op(target, emit_args)
            fresh = self.graph.create_node("call_function", target, emit_args, emit_kwargs, name=node.name)
            fresh.meta.update(self.meta(node, phase))
            made.append(fresh)
            return fresh

        shapes = [
            local_shape(value.shape, layout, self.mesh.sizes, self.coordinate)
            for (_, value), layout in zip(result_values(node), result_layouts(choices))
        ]
        if rule.localize is None:
            handle: Any = emit(node.target, *args, **kwargs)
        else:
            operands = zip(tensor_operands(node), operand_layouts(choices) or ())
            call = LocalCall(
                target=node.target,
                args=args,
                kwargs=kwargs,
                pieces=self.pieces(rule, choices),
                operand_shapes=[
                    local_shape(o.meta["val"].shape, n, self.mesh.sizes, self.coordinate) for o, n in operands
                ],
                result_shapes=shapes,
                result_dtypes=[value.dtype for _, value in result_values(node)],
                emit=emit,
            )
            handle = rule.localize(call)
        if isinstance(handle, fx.Node) and handle not in made:
            handle = emit(torch.ops.aten.alias.default, handle)
        self.value_all(node, handle, made, shapes)
        return handle

    def local_arguments(
        self, node: fx.Node, choices: tuple[Choice, ...], phase: str
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
        wanted = iter(operand_layouts(choices))
        reader = self.reader(node)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, fx.Node):
                if isinstance(leaf.meta.get("val"), torch.Tensor):
                    leaves[index] = self.version(leaf, next(wanted), phase, reader)
                else:
                    leaves[index] = self.scalars[leaf]
            elif isinstance(leaf, torch.device) and self.device is not None:
                leaves[index] = self.device
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return tuple(args), kwargs

    def reader(self, node: fx.Node) -> Reader:
        module, source = str(node.meta.get("module", "")), str(node.meta.get("source", ""))
        return Reader(reader_text(node, self.plan), module, source)

    def pieces(self, rule: Rule, choices: tuple[Choice, ...]) -> dict[str, Piece]:
        out = {}
        for factor in rule.factors:
            axes = [axis for axis, choice in enumerate(choices) if choice.factor and choice.factor.name == factor.name]
            cuts = [(self.mesh.sizes[axis], self.coordinate[axis]) for axis in axes]
            offset, length = local_range(factor.size, cuts)
            out[factor.name] = Piece(offset, length, factor.size, math.prod(parts for parts, _ in cuts))
        return out

    def value_all(self, node: fx.Node, handle: Any, made: list[fx.Node], shapes: list[tuple[int, ...]]) -> None:
        """Give every emitted node its ``val``: results by their layouts, others by a run on meta tensors."""
        values = result_values(node)
        pieces = [torch.empty(s, dtype=v.dtype, device="meta") for s, (_, v) in zip(shapes, values)]
        by_index = {index: piece for (index, _), piece in zip(values, pieces)}
        known: dict[fx.Node, Any] = {}
        if isinstance(handle, (tuple, list)):
            known = {part: by_index[index] for index, part in enumerate(handle) if isinstance(part, fx.Node)}
        elif has_many_results(node):
            known[handle] = tuple(by_index.get(index) for index in range(len(node.meta["val"])))
        else:
            known[handle] = pieces[0] if pieces else node.meta.get("val")
        for fresh in made:
            fresh.meta["val"] = known[fresh] if fresh in known else _run_on_meta(fresh)

    def lower_outputs(self, phase: str, made: str | None = None) -> None:
        """Bring the outputs of a phase to where the plan wants them: gradients as soon as they are ``made``."""
        for index in self.outputs_of.get(made, ()) if made is not None else range(len(self.program.outputs)):
            role = self.program.outputs[index]
            if role.node is None or (role.kind == "gradient") != (phase == BACKWARD):
                continue
            if self.end_layouts[index] is not None:
                continue
            origin = self.globals[role.node]
            if not isinstance(origin.meta.get("val"), torch.Tensor):
                self.ends[index] = self.scalars[origin]
                continue
            layout = self.output_layout(role)
            what = f"the {role.kind}" if role.kind == "output" else f"the {role.kind} of"
            reader = Reader(f"{what} {role.name}".strip(), "", "")
            self.ends[index] = self.version(origin, layout, phase, reader)
            self.end_layouts[index] = layout

    def output_layout(self, role: Output) -> Layout:
        if role.kind != "output":
            return input_layout(self.program.input_of(role.of), self.plan)
        text = self.plan.outputs.get(role.name)
        if text is None:
            raise LoweringError(f"the plan does not say where the output {role.name} lies")
        return parse_layout(text)


def _on_meta(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same form on meta: constants of the program keep the fake tensors of their capture."""
    if value.is_meta:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _run_on_meta(node: fx.Node) -> Any:
    def plain(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            return pytree.tree_map_only(torch.Tensor, _on_meta, leaf.meta["val"])
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf

    args, kwargs = pytree.tree_map(plain, (tuple(node.args), dict(node.kwargs)))
    target: Any = node.target
    return target(*args, **kwargs)
