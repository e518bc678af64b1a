"""The mesh of a cluster whose shape is searched: the first rank searches, every rank lays the mesh that was found."""

from __future__ import annotations

import os
from collections.abc import Callable

from autopar.errors import PlanError
from autopar.passes.pipeline_plan import whole_mesh
from autopar.plans import Plan
from autopar.runtime.agree import share_bytes
from autopar.runtime.groups import MeshGroups, connect


def choose_mesh(
    groups: MeshGroups, plan: Plan | str | os.PathLike[str] | None, search: Callable[[], Plan]
) -> tuple[MeshGroups, Plan]:
    """Return the processes on the mesh of a plan, and the plan: the first rank's, given or searched. Collective.

    Args:
        groups: the processes on any mesh.
        plan: a plan, or the path of a saved one; None to search.
        search: makes a plan; called on the first rank.

    Raises:
        PlanError: on every rank, when the plan is for another number of devices.
    """
    data: bytes | None = None
    with groups.together("searching the cluster"):
        if groups.rank == 0:
            found = search() if plan is None else plan if isinstance(plan, Plan) else Plan.load(plan)
            data = found.to_bytes()
    chosen = Plan.from_bytes(share_bytes(groups.control, data))
    mesh = whole_mesh(chosen)
    if mesh.num_ranks != groups.mesh.num_ranks:
        raise PlanError(
            f"the plan was made for {mesh.num_ranks} devices ({mesh}), but the cluster has {groups.mesh.num_ranks}; "
            "make a plan for this cluster"
        )
    same = (mesh.sizes, mesh.names) == (groups.mesh.sizes, groups.mesh.names)
    return groups if same else connect(lambda: mesh), chosen
