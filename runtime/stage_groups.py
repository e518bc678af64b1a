"""The processes behind a mesh with a pipeline axis: those of this rank's stage, and its neighbours along the axis."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.mesh import PIPELINE_AXIS, Mesh
from autopar.passes.pipeline_plan import stage_mesh
from autopar.plans import Plan
from autopar.runtime.board import Board
from autopar.runtime.groups import MeshGroups, boards_of, names_of


@dataclass(frozen=True, eq=False)
class StageGroups:
    """Where this rank stands in a pipeline.

    Attributes:
        whole: all processes.
        stage: those that share this rank's place on the pipeline axis; agreements are among all processes all the same.
        place: this rank's place on the pipeline axis.
        num_places: ranks of the axis.
        line: the group along the axis; None without one.
    """

    whole: MeshGroups
    stage: MeshGroups
    place: int
    num_places: int
    line: dist.ProcessGroup | None

    @property
    def line_board(self) -> Board | None:
        """Where the ranks of the line tell each other a few numbers; None where they can't."""
        axis = self.whole.mesh.pipeline_axis
        return None if axis is None else self.whole.boards[axis]

    def global_rank(self, place: int) -> int:
        """Return the global rank of the process at a place of this rank's line."""
        assert self.line is not None
        return dist.get_global_rank(self.line, place)


def with_stages_of(groups: MeshGroups, plan: Plan) -> MeshGroups:
    """Return the groups of the mesh with the pipeline axis of a plan, where the mesh names none."""
    record = plan.pipeline
    if record is None or record.ranks == 1 or groups.mesh.pipeline_axis is not None:
        return groups
    return replace(groups, mesh=replace(groups.mesh, pipeline=groups.mesh.names[record.axis]))


def alone(groups: MeshGroups) -> StageGroups:
    """Return the groups of a mesh without stages."""
    return StageGroups(groups, groups, 0, 1, None)


def stage_groups(groups: MeshGroups) -> StageGroups:
    """Return the groups of a mesh with or without a pipeline axis. Collective."""
    axis = groups.mesh.pipeline_axis
    if axis is None:
        return alone(groups)
    inner = stage_mesh(groups.mesh)
    device_mesh = _device_mesh(groups, inner, axis)
    coordinate = tuple(at for i, at in enumerate(groups.coordinate) if i != axis) or (0,)
    stage = MeshGroups(
        mesh=inner,
        device_mesh=device_mesh,
        device=groups.device,
        coordinate=coordinate,
        ranks=tuple(int(rank) for rank in device_mesh.mesh.flatten().tolist()),
        control=groups.control,
        board=groups.board,
        boards=boards_of(device_mesh),
        names=names_of(device_mesh, len(groups.ranks)),
    )
    line = groups.device_mesh.get_group(axis)
    return StageGroups(groups, stage, groups.coordinate[axis], groups.mesh.sizes[axis], line)


def _device_mesh(groups: MeshGroups, inner: Mesh, axis: int) -> DeviceMesh:
    whole = groups.device_mesh
    names = tuple(name for i, name in enumerate(groups.mesh.names) if i != axis)
    if names and not whole.mesh_dim_names:
        whole = DeviceMesh(whole.device_type, whole.mesh, mesh_dim_names=groups.mesh.names)
    if names:
        return whole[names if len(names) > 1 else names[0]]
    ranks = torch.tensor(groups.ranks).reshape(-1, 1)
    lonely = DeviceMesh(whole.device_type, ranks, mesh_dim_names=(PIPELINE_AXIS, *inner.names))
    return lonely[inner.names[0]]
