"""Rewrite a program of the whole batch into one of a micro-batch: the batch is split over an axis in time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.errors import LoweringError, OptionError
from autopar.mesh import Coordinate, Mesh
from autopar.placement import PARTIAL_NAMES
from autopar.plans import Options

from .annotate import annotate
from .complete_plan import complete_plan
from .estimate_totals import estimate_totals
from .lower_rank import Lowering, Reader
from .micro_batch_choices import AXIS, choose_micro_batches
from .program import Input, Output, Program, is_random
from .redistribution import Arc
from .rules.micro_batches import BERNOULLI_PART, JOIN, MICRO_BATCH, OVER
from .rules.rule import Choice

INDEX = "micro_batch"
"""The name of the input that holds the number of the micro-batch."""

_BERNOULLI: Any = torch.ops.autopar.bernoulli.default
_ADD: Any = torch.ops.aten.add.Tensor
_MAX_TRIES = 8


def micro_batches(
    program: Program, count: int, *, outputs: str = "auto", staged: bool = False, norms: Collection[str] = ()
) -> Program:
    """Return the program that runs ``count`` times, once a micro-batch, and computes what ``program`` computes at once.

    It has one more input, ``micro_batch``, a 0-dim integer. Nodes that depend on it, up to the next
    ``over_micro_batches`` or ``join_micro_batches``, run once a micro-batch; all others run once. Inputs and outputs
    are of the whole batch.

    Args:
        program: of the whole batch; annotated here if it is not yet.
        count: how many micro-batches; it divides the batch.
        outputs: with ``"auto"`` the outputs beside a loss are left out (None), since to hold them is to hold the batch.
        staged: the program will be cut into stages: gradients of a parameter that several stages read are accumulated
            apart, so that they travel once a step and not once a micro-batch.
        norms: full names of modules whose statistics shall be those of each micro-batch (``estimate_totals``).

    Raises:
        OptionError: the batch does not divide, or a sum over the batch is wanted whole in the middle of the forward or
            of the backward, as by a batch norm.
    """
    if any("rule" not in node.meta for node in program.ops()):
        annotate(program)
    if program.loss is not None and outputs == "auto":
        program = _only_loss(program)
    for role in program.outputs:
        if role.kind == "buffer" and program.input_of(role.of).kind == "input":
            raise OptionError(
                f"the model writes into its input {role.name}, of which micro-batches have a part each; write into a "
                "copy in the model, or run the batch at once (micro_batches=1)"
            )
    choices = choose_micro_batches(program, count)
    for _ in range(_MAX_TRIES):
        made = [_Cutting(program, count, choices, outputs, index) for index in sorted({0, 1, count - 1} - {count})]
        moving = _moving(made)
        if not moving:
            return annotate(_finish(program, made[0], count, staged, norms))
        for name in moving:
            choices[name] = program.nodes()[name].meta["rule"].choices()[0]
    raise LoweringError(f"some ops have constants that differ from micro-batch to micro-batch: {', '.join(moving)}")


def _only_loss(program: Program) -> Program:
    """Return the program without the other outputs: None stands in their place."""
    outputs = tuple(
        replace(role, node=None, constant=None) if role.kind == "output" and role.index != program.loss else role
        for role in program.outputs
    )
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(program.graph, env)
    ends = program.graph.output_node().args[0]
    graph.output(
        tuple(
            None if role.node is None else env[end]  # type: ignore[index]
            for role, end in zip(outputs, ends)  # type: ignore[arg-type]
        )
    )
    _drop_dead(graph)
    module = fx.GraphModule(program.graph_module, graph)
    return replace(program, graph_module=module, outputs=outputs)


def _drop_dead(graph: fx.Graph) -> None:
    """Erase what nobody reads; random ops stay, for the numbers after them."""
    for node in reversed(list(graph.nodes)):
        dead = node.op in ("call_function", "get_attr") and not node.users
        if dead and not is_random(node) and not getattr(node.meta.get("rule"), "random", False):
            graph.erase_node(node)


class _Cutting(Lowering):
    """The lowering of the axis in time, at one micro-batch; every op stays what it is, arcs become ops of their own."""

    library_op = staticmethod(lambda target, args: (target, args))

    def __init__(self, program: Program, count: int, choices: Mapping[str, Choice], outputs: str, index: int) -> None:
        mesh = Mesh((count,), (AXIS,))
        names = {name: (choice.name,) for name, choice in choices.items()}
        plan = complete_plan(program, mesh, names, {}, options=Options(outputs="full"))
        coordinate: Coordinate = (index,)
        super().__init__(program, plan, coordinate, None)
        self.count = count
        self.index = self.graph.placeholder(INDEX)
        self.index.meta.update(
            val=torch.empty((), dtype=torch.int64, device="meta"), phase="forward", module="", source=""
        )
        self.local = self.local_program(self.joint(), False)

    def move(self, tensor: fx.Node, node: fx.Node, arc: Arc, phase: str, reader: Reader) -> fx.Node:
        value: torch.Tensor = tensor.meta["val"]
        source, target = arc.source[0], arc.target[0]
        made, home = node, self.phase(tensor)  # a total of the forward is one, whoever reads it
        if source >= 0:
            made = self.emit_move(JOIN, (made, source, self.count), f"{tensor.name}_joined", tensor, home, reader)
        elif source in PARTIAL_NAMES:
            made = self.emit_move(OVER, (made, PARTIAL_NAMES[source]), f"{tensor.name}_total", tensor, home, reader)
        made.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device="meta")
        if target >= 0:
            name = f"{tensor.name}_part"
            made = self.emit_move(MICRO_BATCH, (made, self.index, target, self.count), name, tensor, phase, reader)
            made.meta["val"] = self.piece(value, arc.target)
        return made

    def emit_move(
        self, target: Any, args: tuple[Any, ...], name: str, tensor: fx.Node, phase: str, reader: Reader
    ) -> fx.Node:
        made = self.graph.create_node("call_function", target, args, name=name)
        made.meta.update(
            phase=phase,
            module=tensor.meta.get("module", ""),
            source=tensor.meta.get("source", ""),
            wanted_by=reader.name,
        )
        home = tensor.meta.get("forward_node") if phase == "backward" else None
        if home is not None:
            made.meta["forward_node"] = home
        return made


def _moving(made: list[_Cutting]) -> list[str]:
    """Return the ops of the whole program whose constants differ from micro-batch to micro-batch, but for dropout."""
    found: dict[str, None] = {}
    for nodes in zip(*(cutting.graph.nodes for cutting in made), strict=True):
        first = nodes[0]
        fixed = first.op != "call_function" or first.target is _BERNOULLI
        if not fixed and len({str((node.args, node.kwargs)) for node in nodes}) > 1:
            found[first.meta["origin"]] = None
    return list(found)


def _finish(program: Program, cutting: _Cutting, count: int, staged: bool, norms: Collection[str]) -> Program:
    graph = cutting.graph
    _move_masks(cutting)
    if norms and count > 1:
        returned = zip(program.outputs, graph.output_node().args[0])  # type: ignore[arg-type]
        gradients = [end for role, end in returned if role.kind == "gradient" and isinstance(end, fx.Node)]
        estimate_totals(graph, norms, varying(graph, {INDEX: None}), count, dict.fromkeys(gradients))
    _total_outputs(graph, count)
    if staged:
        _total_summands(graph)
    _drop_dead(graph)
    placeholders = [node for node in graph.nodes if node.op == "placeholder" and node is not cutting.index]
    roles = list(program.inputs)
    at = next((i for i, role in enumerate(roles) if role.kind == "tangent"), len(roles))
    if at < len(placeholders):
        placeholders[at].prepend(cutting.index)
    elif placeholders:
        placeholders[-1].append(cutting.index)
    roles.insert(at, Input(cutting.index.name, "input", INDEX))
    names = {node.name for node in graph.nodes}
    for node in graph.nodes:
        if node.meta.get("forward_node", node.name) not in names:
            del node.meta["forward_node"]
        node.meta.pop("layout", None)
        node.meta.pop("tensor", None)
    ends = graph.output_node().args[0]
    outputs = tuple(
        _renamed(role, end)
        for role, end in zip(program.outputs, ends)  # type: ignore[arg-type]
    )
    module = fx.GraphModule(program.graph_module, graph)
    made = replace(program, graph_module=module, inputs=tuple(roles), outputs=outputs, micro_batches=count)
    _refuse_inner_totals(made, count)
    return made


def _renamed(role: Output, end: Any) -> Output:
    return replace(role, node=end.name) if isinstance(end, fx.Node) else role


def _move_masks(cutting: _Cutting) -> None:
    """Let the masks that are split over the micro-batches move with their number."""
    for node in list(cutting.graph.nodes):
        if node.target is not _BERNOULLI:
            continue
        whole: torch.Tensor = cutting.globals[node.meta["origin"]].meta["val"]
        piece: torch.Tensor = node.meta["val"]
        dims = [d for d, (a, b) in enumerate(zip(whole.shape, piece.shape)) if a != b]
        if not dims:
            continue
        node.target = BERNOULLI_PART
        node.args = (cutting.index, *node.args, dims[0], piece.shape[dims[0]])


def _total_outputs(graph: fx.Graph, count: int) -> None:
    """Hand out, as a total, every output that each micro-batch has whole: of the only one, or after random numbers."""
    output = graph.output_node()
    moves = varying(graph, {INDEX: None})
    totals: dict[fx.Node, fx.Node] = {}
    for end in output.all_input_nodes:
        if end.op == "call_function" and (moves[end] or count == 1):
            with graph.inserting_after(end):
                totals[end] = graph.create_node("call_function", OVER, (end, "same"), name=f"{end.name}_total")
            kept = ("val", "phase", "module", "source")
            totals[end].meta = {key: value for key, value in end.meta.items() if key in kept}
    output.args = fx.node.map_arg(output.args, lambda end: totals.get(end, end))


def _total_summands(graph: fx.Graph) -> None:
    """Turn totals of sums into sums of totals, in the backward."""
    for node in list(graph.nodes):
        total = node
        while total.target is OVER and total.args[1] == "sum" and total.meta["phase"] == "backward":
            added: fx.Node = total.args[0]
            if not _adds_alone(added):
                break
            with graph.inserting_before(total):
                apart = [_total_of(graph, part, total) for part in added.args]
                whole = graph.create_node("call_function", _ADD, tuple(apart), name=f"{added.name}_whole")
            whole.meta = {key: value for key, value in added.meta.items() if key != "forward_node"}
            total.replace_all_uses_with(whole)
            graph.erase_node(total)
            graph.erase_node(added)
            total = apart[0]  # a sum of three is a sum of a sum


def _adds_alone(node: fx.Node) -> bool:
    """Tell whether a node adds two tensors of its own shape for one reader."""
    plain = node.target is _ADD and len(node.users) == 1 and len(node.args) == 2 and not node.kwargs
    return plain and all(
        isinstance(part, fx.Node) and part.meta["val"].shape == node.meta["val"].shape for part in node.args
    )


def _total_of(graph: fx.Graph, part: Any, like: fx.Node) -> fx.Node:
    made = graph.create_node("call_function", OVER, (part, "sum"), name=f"{part.name}_total")
    made.meta = {key: value for key, value in like.meta.items() if key != "forward_node"}
    made.meta["val"] = part.meta["val"]
    return made


def completes(node: fx.Node) -> bool:
    """Tell whether a node takes what all micro-batches give and hands out the whole."""
    return node.target in (OVER, JOIN)


def varying(graph: fx.Graph, roots: Mapping[str, Any]) -> dict[fx.Node, bool]:
    """Tell for every node whether it is another in every micro-batch: it reads one of ``roots``, or draws."""
    out: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            out[node] = node.name in roots
        elif completes(node):
            out[node] = False
        else:
            out[node] = is_random(node) or any(out[source] for source in node.all_input_nodes)
    return out


def _refuse_inner_totals(program: Program, count: int) -> None:
    """Refuse a program that needs a total over the batch in the middle of the forward, or of the backward.

    Raises:
        OptionError: it names the op that wants the total, and its line.
    """
    moves = varying(program.graph, {INDEX: None})
    waits: dict[tuple[fx.Node, str], fx.Node | None] = {}
    for node in program.graph.nodes:
        for phase in ("forward", "backward"):
            own = node if completes(node) and node.meta["phase"] == phase else None
            found = [waits[source, phase] for source in node.all_input_nodes]
            waits[node, phase] = own or next((wait for wait in found if wait is not None), None)
        if node.op == "output" or not moves[node]:
            continue
        total = waits[node, node.meta["phase"]]
        if total is not None:
            raise OptionError(_inner_total(node, total, count))


def _inner_total(node: fx.Node, total: fx.Node, count: int) -> str:
    def place(of: fx.Node) -> str:
        module, source = of.meta.get("module"), of.meta.get("source")
        return f"{of.name}{f' in {module}' if module else ''}{f' ({source})' if source else ''}"

    return (
        f"micro_batches={count} can't be exact: {place(node)} needs {place(total)} over the whole batch before it can "
        f"go on, so that every micro-batch would wait for all others in the middle of the {node.meta['phase']}, as "
        "with a batch norm; use a norm within one row (layer, group or instance norm), eval mode for the norm, "
        "batch_norm='per_micro_batch' for statistics of each micro-batch, or micro_batches=1"
    )
