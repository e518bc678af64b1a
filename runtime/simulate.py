"""Run every rank of a mesh in one process: a lock-step interpreter of lowered graphs. No process group."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.errors import LoweringError, MismatchError
from autopar.mesh import Mesh
from autopar.passes.collective_calls import WAIT, Call, collective_calls, is_coalesced, is_collective
from autopar.passes.local_program import LocalProgram, group_word
from autopar.passes.program import is_random
from autopar.placement import PARTIAL_NAMES, Layout, is_partial, layout_name, local_offset, local_shape

Watch = Callable[[fx.Node, list[Any]], None]
"""``watch(node of rank 0, value on every rank)`` is called after each node."""

_REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


@dataclass
class Moved:
    """One collective that ran: its kind, mesh axis and the bytes that the fullest rank handed in."""

    kind: str
    axis: int
    tensor: str
    phase: str
    bytes: int


@dataclass
class StepResult:
    """What a simulated step yields.

    Attributes:
        values: one an element of the program's ``outputs``, assembled to its global shape; None where there is none.
        local: the same on every rank, unassembled.
        moved: every collective that ran, in order.
    """

    values: list[torch.Tensor | None]
    local: list[list[torch.Tensor | None]]
    moved: list[Moved] = field(default_factory=list)


def shard(tensor: torch.Tensor, layout: Layout, mesh: Mesh, coordinate: Sequence[int]) -> torch.Tensor:
    """Return the piece of a global tensor that the rank at ``coordinate`` holds, as a tensor of its own."""
    piece = tensor
    offsets = local_offset(tensor.shape, layout, mesh.sizes, coordinate)
    lengths = local_shape(tensor.shape, layout, mesh.sizes, coordinate)
    for dim, (offset, length) in enumerate(zip(offsets, lengths)):
        piece = piece.narrow(dim, offset, length)
    return piece.detach().clone(memory_format=torch.contiguous_format)


def assemble(
    pieces: Sequence[torch.Tensor], layout: Layout, shape: Sequence[int], mesh: Mesh, what: str = "a tensor"
) -> torch.Tensor:
    """Return the global tensor of the pieces that all ranks hold; partial pieces are reduced.

    Raises:
        MismatchError: a piece has the wrong shape, or ranks that should hold the same piece differ.
    """
    for coordinate, piece in zip(mesh.coordinates(), pieces, strict=True):
        expected = local_shape(shape, layout, mesh.sizes, coordinate)
        if tuple(piece.shape) != expected:
            raise MismatchError(
                f"{what} in {layout_name(layout)} should be {expected} on rank {mesh.rank(coordinate)}; "
                f"its piece is {tuple(piece.shape)}"
            )
    reduced = _reduce_partials(list(pieces), layout, mesh)
    whole = torch.empty(tuple(shape), dtype=pieces[0].dtype)
    owner: dict[tuple[int, ...], torch.Tensor] = {}
    for rank, coordinate in enumerate(mesh.coordinates()):
        offsets = local_offset(shape, layout, mesh.sizes, coordinate)
        piece = reduced[rank]
        if offsets in owner:
            if not same(owner[offsets], piece):
                gap = difference(owner[offsets], piece)
                raise MismatchError(f"{what} in {layout_name(layout)} differs between ranks by {gap:.3g}")
            continue
        owner[offsets] = piece
        target = whole
        for dim, offset in enumerate(offsets):
            target = target.narrow(dim, offset, piece.shape[dim])
        target.copy_(piece)
    return whole


def global_shape(pieces: Sequence[torch.Tensor], layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of the global tensor that ``pieces``, one a rank, make up."""
    shape = list(pieces[0].shape)
    for dim in range(len(shape)):
        apart = [c for c in mesh.coordinates() if all(not index or code == dim for index, code in zip(c, layout))]
        shape[dim] = sum(pieces[mesh.rank(c)].shape[dim] for c in apart)
    return tuple(shape)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return complex numbers as pairs of real ones, any others as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors that should be copies of each other are: bit for bit, or within rounding."""
    if torch.equal(a, b):
        return True
    a, b = as_real(a), as_real(b)
    if not a.is_floating_point():
        return False
    tolerance = 64 * torch.finfo(a.dtype).eps
    return bool(
        torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(b.nan_to_num().abs().max()), equal_nan=True)
    )


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest absolute difference, infinite where one of them alone is not a number."""
    if a.numel() == 0:
        return 0.0
    a, b = as_real(a).to(torch.float64), as_real(b).to(torch.float64)
    equal = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(equal, 0.0, (a - b).abs()).nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def simulate_step(
    programs: Sequence[LocalProgram], values: Mapping[str, torch.Tensor], *, watch: Watch | None = None
) -> StepResult:
    """Run forward and backward of every rank on global ``values`` and assemble what comes out.

    Args:
        programs: one a rank, in rank order.
        values: placeholder name -> global tensor, tangents included when there is a backward.
        watch: sees every node's values, of the forward and then of the backward.
    """
    first = programs[0]
    mesh = first.mesh
    moved: list[Moved] = []

    def pieces(names: Sequence[str]) -> list[list[Any]]:
        coordinates = [program.coordinate for program in programs]
        return [[shard(values[n], first.input_layouts[n], mesh, c) for n in names] for c in coordinates]

    inputs = [role.node for role in first.inputs if role.kind != "tangent"]
    results = run_lockstep([p.forward for p in programs], pieces(inputs), mesh, moved=moved, watch=watch)
    forward = [list(result[: len(result) - first.num_saved]) for result in results]
    saved = [list(result[len(result) - first.num_saved :]) for result in results]
    backward: list[list[Any]] = [[] for _ in programs]
    if first.backward is not None:
        tangents = pieces([role.node for role in first.inputs if role.kind == "tangent"])
        halves = [program.backward for program in programs if program.backward is not None]
        arguments = [a + b for a, b in zip(saved, tangents)]
        backward = [list(result) for result in run_lockstep(halves, arguments, mesh, moved=moved, watch=watch)]
    local = [_in_output_order(first, f, b) for f, b in zip(forward, backward)]
    whole: list[torch.Tensor | None] = []
    for index, (role, layout) in enumerate(zip(first.outputs, first.output_layouts)):
        if role.node is None or layout is None:
            whole.append(None)
            continue
        held = [piece for ranks in local if (piece := ranks[index]) is not None]
        whole.append(assemble(held, layout, global_shape(held, layout, mesh), mesh, f"the {role.kind} {role.name}"))
    return StepResult(whole, local, moved)


def run_lockstep(
    modules: Sequence[fx.GraphModule],
    arguments: Sequence[Sequence[Any]],
    mesh: Mesh,
    *,
    moved: list[Moved] | None = None,
    watch: Watch | None = None,
) -> list[Any]:
    """Run one graph a rank node by node; collectives combine values across the groups of ``mesh``.

    All ranks draw random numbers from the same state of the default generator, as processes do that were seeded alike.

    Raises:
        LoweringError: the graphs are not the same sequence of ops.
    """
    num_ranks = len(modules)
    lists = [list(module.graph.nodes) for module in modules]
    if len({len(nodes) for nodes in lists}) != 1:
        raise LoweringError(f"ranks run graphs of different lengths: {[len(nodes) for nodes in lists]} nodes")
    envs: list[dict[fx.Node, Any]] = [{} for _ in modules]
    feeds = [iter(values) for values in arguments]
    for nodes in zip(*lists):
        head = nodes[0]
        if any(node.op != head.op or (head.op == "call_function" and node.target != head.target) for node in nodes):
            raise LoweringError(f"ranks run different ops at {head.name}: {[str(node.target) for node in nodes]}")
        if head.op == "output":
            return [_read(node.args[0], env) for node, env in zip(nodes, envs)]
        if head.op == "placeholder":
            results = [next(feed) for feed in feeds]
        elif head.op == "get_attr":
            results = [operator.attrgetter(str(head.target))(module) for module in modules]
        elif is_collective(head):
            handed = [_read(node.args, env) for node, env in zip(nodes, envs)]
            results = _communicate_all(head, handed, mesh, moved)
        else:
            results = _compute(nodes, envs)
        for env, node, result in zip(envs, nodes, results, strict=True):
            env[node] = result
        if watch is not None:
            watch(head, results)
    raise LoweringError(f"the graph of {num_ranks} ranks has no output node")


def _in_output_order(program: LocalProgram, forward: list[Any], backward: list[Any]) -> list[torch.Tensor | None]:
    halves = {"gradient": iter(backward)}
    rest = iter(forward)
    return [None if role.node is None else next(halves.get(role.kind, rest)) for role in program.outputs]


def _read(args: Any, env: dict[fx.Node, Any]) -> Any:
    return fx.node.map_arg(args, lambda node: env[node])


def _compute(nodes: Sequence[fx.Node], envs: Sequence[dict[fx.Node, Any]]) -> list[Any]:
    target: Any = nodes[0].target
    if target is WAIT:
        return [env[node.args[0]] for node, env in zip(nodes, envs)]  # type: ignore[index]
    state = torch.random.get_rng_state() if is_random(nodes[0]) else None
    results = []
    for node, env in zip(nodes, envs):
        if state is not None:
            torch.random.set_rng_state(state)
        results.append(target(*_read(node.args, env), **_read(node.kwargs, env)))
    return results


def _communicate_all(node: fx.Node, handed: list[Any], mesh: Mesh, moved: list[Moved] | None) -> list[Any]:
    """Run a collective, or each of those that run as one; return the result, or the list of results, of every rank."""
    calls = collective_calls(node)
    several = is_coalesced(node)
    results: list[list[torch.Tensor]] = [[] for _ in handed]
    for index, call in enumerate(calls):
        parts = [(args[0][index], *args[1:]) if several else args for args in handed]
        values = _communicate(node, call, parts, mesh)
        for mine, value in zip(results, values):
            mine.append(value)
        for args, value in zip(parts, values) if call.in_place else ():
            args[0].copy_(value)  # so that whoever reads the operand once more is found out
        if moved is not None:
            nbytes = max(args[0].numel() * args[0].element_size() for args in parts)
            phase = node.meta.get("phase", "")
            moved.extend(Moved(call.kind, axis, call.origin, phase, nbytes) for axis in call.axes)
    return list(results) if several else [mine[0] for mine in results]


def _communicate(node: fx.Node, call: Call, handed: list[Any], mesh: Mesh) -> list[torch.Tensor]:
    """Run a collective; one on several axes as one after the other, so that a sum has the order of the arcs."""
    group = handed[0][-1]
    if any(args[-1] != group for args in handed):
        raise LoweringError(f"ranks name different groups at {node.name}: {[args[-1] for args in handed]}")
    if group != group_word(call.axes) or (len(call.axes) > 1 and call.kind != "all_reduce"):
        raise LoweringError(f"{node.name} is {call.kind} on the axes {call.axes}, but its group is {group}")
    for axis in call.axes[:-1]:
        handed = [(value, *args[1:]) for value, args in zip(_along(node, call.kind, axis, handed, mesh), handed)]
    return _along(node, call.kind, call.axes[-1], handed, mesh)


def _along(node: fx.Node, kind: str, axis: int, handed: list[Any], mesh: Mesh) -> list[torch.Tensor]:
    results: list[torch.Tensor | None] = [None] * len(handed)
    for coordinate in mesh.coordinates():
        if coordinate[axis] == 0:
            ranks = mesh.group(coordinate, axis)
            members = [handed[rank] for rank in ranks]
            _check_alike(node, members)
            for rank, result in zip(ranks, _combine(kind, members)):
                results[rank] = result
    return [result for result in results if result is not None]


def _check_alike(node: fx.Node, members: list[Any]) -> None:
    shapes = {tuple(args[0].shape) for args in members}
    if len(shapes) != 1 or len({str(args[1:]) for args in members}) != 1:
        raise LoweringError(f"{node.name}: ranks of one group hand in different shapes or arguments: {sorted(shapes)}")
    if not all(args[0].is_contiguous() for args in members):
        raise LoweringError(f"{node.name}: a rank hands in a tensor that is not contiguous")


def _combine(kind: str, members: list[Any]) -> list[torch.Tensor]:
    tensors = [args[0] for args in members]
    size = len(tensors)
    if kind == "all_gather":
        return _checked_size(kind, members[0][1], size, [torch.cat(tensors) for _ in tensors])
    if kind == "all_reduce":
        total = _reduced(tensors, members[0][1])
        return [total, *(total.clone() for _ in tensors[1:])]  # apart, as on ranks: what follows may write into it
    if kind == "reduce_scatter":
        pieces = _reduced(tensors, members[0][1]).chunk(size)
        return _checked_size(kind, members[0][2], size, [piece.contiguous() for piece in pieces])
    splits = [tensor.split(list(args[2])) for tensor, args in zip(tensors, members)]
    return [torch.cat([pieces[index] for pieces in splits]) for index in range(size)]


def _checked_size(kind: str, stated: int, size: int, results: list[torch.Tensor]) -> list[torch.Tensor]:
    if stated != size or len(results) != size:
        raise LoweringError(f"{kind} over a group of {size} ranks states {stated} and yields {len(results)} pieces")
    return results


def reduce_pair(op: str, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the sum, maximum, minimum or product of two tensors; of truth values as logic."""
    return _REDUCE[op](one, other)


def _reduced(tensors: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = reduce_pair(op, total, tensor)
    return total if len(tensors) > 1 else total.clone()


def _reduce_partials(pieces: list[torch.Tensor], layout: Layout, mesh: Mesh) -> list[torch.Tensor]:
    for axis, code in enumerate(layout):
        if is_partial(code):
            old = pieces
            pieces = [_reduced([old[r] for r in mesh.group(c, axis)], PARTIAL_NAMES[code]) for c in mesh.coordinates()]
    return pieces
