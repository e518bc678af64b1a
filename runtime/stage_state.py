"""The state of a module whose parameters lie on several stages: gathered, loaded and clipped over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.placement import REPLICATE
from autopar.runtime.pipeline_processes import spread
from autopar.runtime.stage_groups import StageGroups
from autopar.runtime.state import full_state, local_of, make_parameter

NOTHING = "no_parameters_here"
"""The name of the empty parameter of a rank whose stages have none, so that an optimizer can be built there too."""


def add_nothing(root: nn.Module, groups: StageGroups) -> None:
    """Give a module without parameters an empty one, which no state dict shows."""
    if any(True for _ in root.parameters()):
        return
    whole = (REPLICATE,) * groups.stage.mesh.num_axes
    root._parameters[NOTHING] = make_parameter(torch.zeros(0, device=groups.stage.device), whole, groups.stage, True)

    def hide(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state.pop(prefix + NOTHING, None)

    def show(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[prefix + NOTHING] = root._parameters[NOTHING]

    root.register_state_dict_post_hook(hide)
    root.register_load_state_dict_pre_hook(show)


def full_state_of_stages(
    own: Mapping[str, Any], model: nn.Module, places: Mapping[str, int], groups: StageGroups
) -> dict[str, Any]:
    """Return the state of all stages with full plain tensors, in the original's order. Collective.

    Args:
        own: this rank's state dict.
        model: the original, or a copy of it without data.
        places: first full name of a parameter -> place on the pipeline axis.
        groups: the processes.
    """
    mine = full_state(own)
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    made: dict[str, Tensor] = {}
    out: dict[str, Any] = {}
    for name, like in model.state_dict(keep_vars=True).items():
        owner = first.get(id(like))
        if owner is None:
            out[name] = mine[name]
            continue
        if owner not in made:
            here = places[owner] == groups.place
            full = mine[name] if here else torch.empty(like.shape, dtype=like.dtype, device=groups.stage.device)
            made[owner] = spread(full, places[owner], groups)
        out[name] = made[owner]
    return out


def own_part(state: Mapping[str, Any], root: nn.Module, model: nn.Module) -> dict[str, Any]:
    """Return the entries of a state dict that this rank's stages keep, and those that no stage knows."""
    here = set(root.state_dict(keep_vars=True))
    known = set(model.state_dict(keep_vars=True))
    return {name: value for name, value in state.items() if name in here or name not in known}


def clip_over_stages(
    parameters: Sequence[nn.Parameter],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
    groups: StageGroups,
) -> Tensor:
    """Clip the gradients of all stages by their common norm, and return it. Collective.

    Raises:
        RuntimeError: as torch does, on every rank, when the norm is not finite and ``error_if_nonfinite`` is set.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    power = float(norm_type)
    total = torch.zeros((), device=groups.stage.device)
    if gradients:
        norm = nn.utils.get_total_norm(gradients, power, False, foreach)
        total = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if groups.num_places > 1:
        total = total.double() if groups.stage.device.type == "cpu" else total
        largest = power == float("inf")
        total = total if largest else total**power
        dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=groups.line)
        total = (total if largest else total ** (1.0 / power)).float()
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in gradients:
        local = local_of(gradient)
        local.mul_(scale.to(local.dtype))
    return total
