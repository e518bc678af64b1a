"""Say in a sentence why a tensor moves: the same in a plan and in the programs lowered from it."""

from __future__ import annotations

from torch import fx

from autopar.mesh import Mesh
from autopar.passes.redistribution import Arc
from autopar.placement import REPLICATE, code_name
from autopar.plans import Plan


def move_reason(arc: Arc, mesh: Mesh, reader: str) -> str:
    """Return why ``reader`` has a tensor moved: ``gathered over data: wanted whole by layers.0.mlp.up (column)``."""
    source, target = arc.source[arc.axis], arc.target[arc.axis]
    verbs = {
        "all_gather": "gathered",
        "all_reduce": "summed" if code_name(source) == "P" else f"reduced by {code_name(source)[2:-1]}",
        "reduce_scatter": "summed and scattered",
        "all_to_all": f"moved from a split of dim {source}",
        "slice": "cut",
    }
    wanted = "whole" if target == REPLICATE else f"split along dim {target}"
    return f"{verbs[arc.kind]} over {mesh.names[arc.axis]}: wanted {wanted} by {reader}"


def reader_text(node: fx.Node, plan: Plan) -> str:
    """Return who reads a tensor, and how it is split: ``layers.0.mlp.up (batch, column)``."""
    roles = plan.roles.get(node.name) or plan.choices.get(node.name, ())
    words = [role for role in dict.fromkeys(roles) if role and role != "replicate"]
    name = str(node.meta.get("module", "")) or node.name
    return f"{name} ({', '.join(words)})" if words else name
