"""The processes behind a mesh: the device, this rank's place, a group for every set of axes, and one for agreements."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import combinations
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.errors import MeshError
from autopar.mesh import Coordinate, Mesh
from autopar.passes.flatten_buckets import flatten_buckets
from autopar.passes.local_program import GROUP_PREFIX, group_word
from autopar.passes.torch_private import take_arguments_in_a_list
from autopar.runtime.agree import raise_together, require_equal
from autopar.runtime.board import Board, board_of
from autopar.runtime.call_directly import call_directly
from autopar.runtime.choose_kernels import choose_kernels
from autopar.runtime.sum_on_boards import sum_on_boards

CONTROL_TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others to agree: the first rank may be solving meanwhile."""


@dataclass(frozen=True, eq=False)
class MeshGroups:
    """A mesh with processes.

    Attributes:
        mesh: the grid.
        device_mesh: torch's mesh, on which all parameters are DTensors.
        device: where this rank's tensors lie.
        coordinate: this rank's place.
        ranks: the global rank of every member, in the mesh's order.
        control: a gloo group of all members, for agreements on the host.
        board: where they tell each other a few numbers, if they are on one host.
        boards: the same for the ranks along each axis; where the host does not wait for a device alone.
        names: what collectives of lowered graphs call a group -> the name of the process group that this rank is in.
    """

    mesh: Mesh
    device_mesh: DeviceMesh
    device: torch.device
    coordinate: Coordinate
    ranks: tuple[int, ...]
    control: dist.ProcessGroup
    board: Board | None
    boards: tuple[Board | None, ...]
    names: Mapping[str, str]

    @property
    def rank(self) -> int:
        """This rank's number in the mesh, row-major; 0 is the first."""
        return self.mesh.rank(self.coordinate)

    @property
    def joins_axes(self) -> bool:
        """Whether there is a group for every set of axes, not for every axis alone."""
        return sum(size > 1 for size in self.mesh.sizes) < 2 or len(self.names) > self.mesh.num_axes

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Run local work that may fail; when it fails on any rank, raise on every rank. No collectives inside.

        Raises:
            AutoparError: another rank failed; the message says which and how.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        raise_together(self.control, what, error)


def connect(mesh: DeviceMesh | Callable[[], Mesh]) -> MeshGroups:
    """Return the processes behind a mesh; without a process group, start the one that ``torchrun`` describes.

    Args:
        mesh: torch's mesh over any ranks, or what reads the grid over the whole world and may refuse it.

    Raises:
        MeshError: there is no process group, the mesh does not fit the world, or this rank is not in it.
        InputError: the ranks want different grids.
    """
    if isinstance(mesh, DeviceMesh):
        device_mesh, grid = mesh, Mesh.from_device_mesh(mesh)
    else:
        device_mesh, grid = _make_device_mesh(mesh)
    coordinate = device_mesh.get_coordinate()
    if coordinate is None:
        raise MeshError(
            f"rank {dist.get_rank()} is not in the mesh {grid}; call parallelize on the ranks of the mesh only"
        )
    ranks = tuple(int(rank) for rank in device_mesh.mesh.flatten().tolist())
    if list(ranks) != sorted(ranks):
        raise MeshError(
            f"the mesh numbers its ranks as {list(ranks)}; process groups sort theirs, so build the DeviceMesh with "
            "ascending ranks"
        )
    control = _control_group(ranks)
    return MeshGroups(
        mesh=grid,
        device_mesh=device_mesh,
        device=_device_of(device_mesh),
        coordinate=tuple(coordinate),
        ranks=ranks,
        control=control,
        board=board_of(control, CONTROL_TIMEOUT),
        boards=boards_of(device_mesh),
        names=names_of(device_mesh, len(ranks)),
    )


def names_of(device_mesh: DeviceMesh, num_callers: int) -> dict[str, str]:
    """Return the name of the process group along every axis and every set of axes of several ranks. Collective.

    Every rank makes those that it is in, in one order, whether a graph asks for them or not: when one does, it is too
    late to be sure that all ranks are there. A world that is bound to its devices makes a group by splitting its own,
    for which all of it has to come: a mesh over a part of it has groups along single axes only.

    Args:
        num_callers: how many ranks call this together.
    """
    axes = range(device_mesh.ndim)
    names = {group_word([axis]): str(device_mesh.get_group(axis).group_name) for axis in axes}
    world = dist.group.WORLD
    assert world is not None
    if world.bound_device_id is not None and num_callers < world.size():
        return names
    wide = [axis for axis in axes if device_mesh.size(axis) > 1]
    for count in range(2, len(wide) + 1):
        for some in combinations(wide, count):
            names[group_word(some)] = _joint_group(device_mesh, some).group_name
    return names


def joint_ranks(device_mesh: DeviceMesh, axes: Sequence[int]) -> tuple[int, ...]:
    """Return the global ranks of a mesh that differ from this one's place along ``axes`` at most."""
    place = device_mesh.get_coordinate()
    assert place is not None
    index = tuple(slice(None) if axis in axes else at for axis, at in enumerate(place))
    return tuple(int(rank) for rank in device_mesh.mesh[index].flatten().tolist())


def boards_of(device_mesh: DeviceMesh) -> tuple[Board | None, ...]:
    """Return the board of each axis: on a device numbers do not pass through the host, so there is none. Collective."""
    if device_mesh.device_type != "cpu":
        return (None,) * device_mesh.ndim
    return tuple(board_of(device_mesh.get_group(axis), CONTROL_TIMEOUT) for axis in range(device_mesh.ndim))


def _make_device_mesh(read: Callable[[], Mesh]) -> tuple[DeviceMesh, Mesh]:
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise MeshError(
                "there is no process group: start the script by torchrun --nproc-per-node N, "
                "or call torch.distributed.init_process_group first"
            )
        dist.init_process_group()
    on_cuda = torch.cuda.is_available() and dist.get_backend() != "gloo"
    mesh = _agree_on_mesh(read, dist.get_world_size())
    return init_device_mesh("cuda" if on_cuda else "cpu", mesh.sizes, mesh_dim_names=mesh.names), mesh


def _agree_on_mesh(read: Callable[[], Mesh], world: int) -> Mesh:
    """Return the grid that every rank of the world reads, or raise on every rank."""
    control = _control_group(tuple(range(world)))
    mesh, error = Mesh((world,)), None
    try:
        mesh = read()
        _check_size(mesh, world)
    except MeshError as caught:
        error = caught
    raise_together(control, "reading the mesh", error)
    facts = [f"axis {name} of {size}" for name, size in zip(mesh.names, mesh.sizes, strict=True)]
    facts += [
        f"pipeline axis {mesh.pipeline!r}",
        f"device {mesh.device}",
        f"links {', '.join(mesh.links) or 'by default'}",
    ]
    require_equal(control, "the mesh", facts, "pass the same mesh on every rank")
    return mesh


def _check_size(mesh: Mesh, world: int) -> None:
    if mesh.num_ranks == world:
        return
    advice = (
        f"start {mesh.num_ranks} processes or make the mesh smaller"
        if mesh.num_ranks > world
        else "make the mesh as large as the world, or pass a DeviceMesh over the ranks that you mean"
    )
    count = f"{mesh.num_ranks} rank{'s' if mesh.num_ranks > 1 else ''}"
    raise MeshError(f"the mesh {mesh} has {count}, but the world has {world}: {advice}")


def _device_of(device_mesh: DeviceMesh) -> torch.device:
    if device_mesh.device_type == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(device_mesh.device_type)
    return torch.device(device_mesh.device_type, module.current_device())


_CONTROL: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
"""Control groups by world and ranks: a group costs sockets, so that modules on one mesh share it."""


def _control_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    groups = _CONTROL.setdefault(world, {})
    if ranks not in groups:
        groups[ranks] = dist.new_group(
            list(ranks), timeout=CONTROL_TIMEOUT, backend="gloo", use_local_synchronization=True
        )
    return groups[ranks]


_JOINT: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]] = WeakKeyDictionary()
"""Groups along several axes by world, backend and ranks, shared like the others."""


def _joint_group(device_mesh: DeviceMesh, axes: Sequence[int]) -> dist.ProcessGroup:
    """Return the group of the ranks along some axes, with the backend of the first of them."""
    world = dist.group.WORLD
    assert world is not None
    groups = _JOINT.setdefault(world, {})
    ranks = joint_ranks(device_mesh, axes)
    backend = str(dist.get_backend_config(device_mesh.get_group(axes[0])))
    if (backend, ranks) not in groups:
        groups[backend, ranks] = dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
    return groups[backend, ranks]


def bind_groups(
    graph_module: fx.GraphModule,
    group_names: Mapping[str, str],
    device: torch.device,
    *,
    boards: Sequence[Board | None] = (),
    eager: bool = True,
) -> fx.GraphModule:
    """Return a copy of a lowered graph that runs here: real group names, and this rank's device instead of the CPU.

    It takes its arguments in one list, which it empties, so that each is freed after its last use. Graphs are traced on
    the CPU, so a factory such as ``arange`` names it; constants of the graph move too.

    Args:
        graph_module: the graph.
        group_names: what its collectives call a group -> the name of the process group.
        device: of this rank.
        boards: of the ranks along each axis, for sums of a few numbers; empty for none.
        eager: it runs as it is; otherwise it keeps to ops, for a compiler.
    """
    graph = fx.Graph()
    output = graph.graph_copy(graph_module.graph, {})
    graph.output(output)
    flatten_buckets(graph)
    if eager and any(boards):
        sum_on_boards(graph, boards)
    for node in graph.nodes:
        if node.op == "call_function":
            in_collective = getattr(node.target, "namespace", "") == "_c10d_functional"
            bind = partial(_bind, group_names=group_names if in_collective else {}, device=device)
            node.args = fx.node.map_aggregate(node.args, bind)
            node.kwargs = fx.node.map_aggregate(node.kwargs, bind)
    choose_kernels(graph, eager=eager)
    if eager:
        call_directly(graph, device)
    bound = fx.GraphModule(graph_module, take_arguments_in_a_list(graph))
    for node in bound.graph.nodes:
        if node.op == "get_attr":
            value = getattr(bound, str(node.target))
            if isinstance(value, torch.Tensor) and value.device != device:
                setattr(bound, str(node.target), value.to(device))
    return bound


def _bind(leaf: Any, group_names: Mapping[str, str], device: torch.device) -> Any:
    if group_names and isinstance(leaf, str) and leaf.startswith(GROUP_PREFIX):
        return group_names[leaf]
    return device if isinstance(leaf, torch.device) else leaf
