"""The processes behind a mesh with a pipeline axis: those of this rank's stage, and its neighbours along the axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.mesh import Mesh
from autopar.passes.pipeline_plan import PIPELINE_AXIS, pipeline_axis, stage_mesh
from autopar.runtime.groups import MeshGroups


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

    def global_rank(self, place: int) -> int:
        """Return the global rank of the process at a place of this rank's line."""
        assert self.line is not None
        return dist.get_global_rank(self.line, place)


def stage_groups(groups: MeshGroups) -> StageGroups:
    """Return the groups of a mesh whose axis ``pp``, if any, is the pipeline axis. Collective."""
    axis = pipeline_axis(groups.mesh)
    if axis is None:
        return StageGroups(groups, groups, 0, 1, None)
    inner = stage_mesh(groups.mesh)
    device_mesh = _device_mesh(groups, inner)
    coordinate = tuple(at for i, at in enumerate(groups.coordinate) if i != axis) or (0,)
    stage = MeshGroups(
        mesh=inner,
        device_mesh=device_mesh,
        device=groups.device,
        coordinate=coordinate,
        ranks=tuple(int(rank) for rank in device_mesh.mesh.flatten().tolist()),
        control=groups.control,
    )
    line = groups.device_mesh.get_group(axis)
    return StageGroups(groups, stage, groups.coordinate[axis], groups.mesh.sizes[axis], line)


def _device_mesh(groups: MeshGroups, inner: Mesh) -> DeviceMesh:
    whole = groups.device_mesh
    names = tuple(name for name in groups.mesh.names if name != PIPELINE_AXIS)
    if names:
        return whole[names if len(names) > 1 else names[0]]
    ranks = torch.tensor(groups.ranks).reshape(-1, 1)
    lonely = DeviceMesh(whole.device_type, ranks, mesh_dim_names=(PIPELINE_AXIS, *inner.names))
    return lonely[inner.names[0]]
