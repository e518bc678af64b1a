"""Compares a parallel module with one process, from inside a rank."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import autopar
from autopar.passes.annotate import annotate
from autopar.passes.complete_plan import complete_plan
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.shadow import Source
from autopar.runtime.signature import take_apart
from tests import models
from tests.strategies.plans import choices_by, legal_layouts

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def build(name: str, dropout: float = 0.0) -> Built:
    """Return a model of ``tests/models.py``; ranks other than the first get other values, which must not matter.

    The ResNet is in double precision: a kink of its ReLUs can turn a rounding error into a visible difference.
    """
    model, args, kwargs = getattr(models, name)(dropout=dropout)
    if name == "resnet":
        model = model.double()
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda t: t.double() if t.is_floating_point() else t, (args, kwargs)
        )
    if dist.get_rank() != 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    return model, args, kwargs


def split(built: Built, sizes: tuple[int, ...], how: str = "best", **options: Any) -> tuple[ParallelModule, nn.Module]:
    """Return the parallel module and, with the first rank's values, the one-process reference.

    Args:
        how: the plan: ``"best"`` as solved, ``"tight"`` the best in the least memory, ``"random"`` any legal one.
    """
    model, args, kwargs = built
    reference = copy.deepcopy(model)
    if how == "tight":
        options = {**options, "memory": least_memory(built, sizes), "optimizer": "momentum"}
    elif how == "random":
        options = {**options, "plan": random_plan(built, sizes, seed=5)}
    return autopar.parallelize(model, sizes, args, kwargs, **options), reference


def least_memory(built: Built, sizes: tuple[int, ...]) -> int:
    """Return the least budget that has a plan for training with SGD and momentum."""
    model, args, kwargs = built
    try:
        autopar.parallelize(model, sizes, args, kwargs, memory=1, optimizer="momentum")
    except autopar.InfeasibleError as error:
        assert error.least_bytes is not None
        return error.least_bytes
    raise AssertionError("one byte was enough")


def random_plan(built: Built, sizes: tuple[int, ...], seed: int) -> autopar.Plan:
    """Return a legal plan that a seed decides, the same on every rank: splits of every kind, uneven ones too."""
    model, args, kwargs = built
    mesh = autopar.Mesh(sizes)
    call = take_apart(model, args, kwargs, device=None)
    program = annotate(Source(model).capture(call, mesh, "global"))
    pick = random.Random(seed).randrange
    layouts = {}
    for role in program.inputs:
        if role.kind == "parameter":
            options = legal_layouts(program.nodes()[role.node].meta["val"].shape, mesh)
            layouts[role.name] = options[pick(len(options))]
    return complete_plan(program, mesh, choices_by(program, mesh, pick), layouts)


def refusal(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the class and message of the error that ``call`` raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def loss_of(output: Any) -> Tensor:
    """Return the loss among what a model returns."""
    if isinstance(output, Tensor):
        return output
    return output["loss"] if isinstance(output, Mapping) else output[0]


def full(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor as a plain full one. Collective for DTensors."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """Return every gradient as a full tensor. Collective."""
    return {name: full(parameter.grad) for name, parameter in module.named_parameters()}


def state(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and all buffers as full tensors. Collective."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: full(tensor.detach()).clone() for name, tensor in named}  # type: ignore[union-attr]


def worst(found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> tuple[float, str]:
    """Return the largest relative difference and the tensor it is in; infinite when a tensor is on one side only."""
    if list(found) != list(expected):
        return float("inf"), f"names {sorted(set(found) ^ set(expected))[:3]} or their order"
    scale = max((float(t.abs().max()) for t in expected.values() if t is not None and t.numel()), default=0.0)
    out = (0.0, "")
    for name, value in expected.items():
        other = found[name]
        if (value is None) != (other is None):
            return float("inf"), f"{name} is None on one side"
        if value is None or other is None or not value.numel():
            continue
        if value.shape != other.shape or value.dtype != other.dtype:
            return float("inf"), f"{name} is {other.dtype}{list(other.shape)}, not {value.dtype}{list(value.shape)}"
        top = max(float(value.abs().max()), 1e-3 * scale, 1e-12)
        error = float((value.double() - other.double()).abs().max()) / top
        if not error <= out[0]:
            out = (error, name)
    return out
