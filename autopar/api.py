"""What a user calls: ``plan`` and ``parallelize``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.arguments import check_examples, check_mesh, check_module, check_options, check_plan_source
from autopar.cluster import Cluster
from autopar.errors import OptionError
from autopar.mesh import Mesh
from autopar.passes.cost.memory import OptimizerBytes
from autopar.plans import Plan
from autopar.verification import verify as verify

if TYPE_CHECKING:
    from autopar.runtime.parallel_module import ParallelModule


def plan(
    model: torch.nn.Module,
    mesh: DeviceMesh | Mesh | Cluster | str | int | tuple[int, ...],
    example_inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    optimizer: str | OptimizerBytes = "adamw",
    memory: int | float | str | None = None,
    constraints: Mapping[str, str] | None = None,
    inputs: str = "global",
    outputs: str = "auto",
) -> Plan:
    """Find the best plan of a model on a mesh. Touches no data and needs no process group.

    Args:
        model: the module; it may be on the meta device. It is traced in its own mode and in the current grad mode.
        mesh: a ``DeviceMesh``, a ``Mesh``, a ``Cluster`` or its text (``"4x8 h100"``), a number of ranks or axis sizes.
        example_inputs: positional inputs: a tuple, a single tensor, or a dict of keyword inputs.
        kwargs: keyword inputs.
        loss: see ``parallelize``.
        optimizer: its name (``"adamw"``, ``"sgd"``, ``"adafactor"``, ``"adamw-mixed"`` with float32 masters, ...) or an
            ``OptimizerBytes``; it sets the state that a parameter costs.
        memory: budget a rank: bytes, or a text such as ``"40GB"``; None for no bound.
        constraints: pattern of a module or parameter -> technique or layout, as ``{"layers.*.up_proj": "column"}``.
        inputs: ``"global"`` when every rank will pass the global batch, ``"local"`` when it passes its share of dim 0
            over the first mesh axis; the example is of the same kind.
        outputs: ``"full"`` (plain tensors, all differentiable), ``"lie"`` (DTensors where they lie) or ``"auto"``:
            full, but beside a loss where they lie and not differentiated.

    Raises:
        MeshError, OptionError, CaptureError, ConstraintError, InfeasibleError: each says what to do.
    """
    from autopar.passes.pipeline import make_plan
    from autopar.runtime.shadow import Source
    from autopar.runtime.signature import take_apart

    check_module(model)
    grid = check_mesh(mesh)
    options = check_options(optimizer, memory, constraints, inputs, outputs)
    args, named = check_examples(example_inputs, kwargs)
    source = Source.of(model, loss) if loss is not None else Source(model)
    program = source.capture(take_apart(model, args, named, device=None), grid, inputs, outputs)
    return make_plan(program, grid, options)


def parallelize(
    model: torch.nn.Module,
    mesh: DeviceMesh | Mesh | Cluster | str | int | tuple[int, ...],
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    optimizer: str | OptimizerBytes = "adamw",
    memory: int | float | str | None = None,
    constraints: Mapping[str, str] | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    inputs: str = "global",
    outputs: str = "auto",
) -> ParallelModule:
    """Return ``model`` as a module that runs on all ranks of ``mesh``. Every rank calls it, as under ``torchrun``.

    Parameter values come from the first rank of the mesh; the other ranks may hold any values, or meta tensors.

    Args:
        model: the module; it is not changed, and not needed afterwards.
        mesh: a ``DeviceMesh``, a ``Mesh``, a ``Cluster`` or its text (``"4x8 h100"``), a number of ranks or axis sizes.
        example_inputs, example_kwargs: inputs to plan for, as in ``plan``; without them the first call is the example.
        loss: callable applied to what the module returns. Its required parameters beyond the first take the last
            positional inputs of a call: with ``loss=torch.nn.functional.cross_entropy``, ``model(x, y)`` is
            ``cross_entropy(original(x), y)``.
        optimizer, memory, constraints, inputs, outputs: as in ``plan``.
        plan: a plan made before, or the path of a saved one: nothing is solved then.

    Raises:
        MeshError: the mesh does not fit the world, or there is no process group.
        PlanError: ``plan`` was made for another model, mesh or inputs, or its file is damaged.
        OptionError, CaptureError, ConstraintError, InfeasibleError: each says what to do.
        An error on one rank is raised on every rank.
    """
    from autopar.runtime.groups import connect
    from autopar.runtime.parallel_module import ParallelModule

    groups = connect(mesh if isinstance(mesh, DeviceMesh) else partial(check_mesh, mesh))
    with groups.together("the arguments of parallelize"):
        if isinstance(model, ParallelModule):
            raise OptionError("the model runs in parallel already; parallelize the original, and only once")
        check_module(model)
        check_plan_source(plan)
        options = check_options(optimizer, memory, constraints, inputs, outputs)
        if example_inputs is None and example_kwargs is None:
            example = None
        else:
            example = check_examples(example_inputs, example_kwargs)
        if example is not None and not example[0] and not example[1]:
            raise OptionError("the example inputs are empty; give them, or leave them out to trace at the first call")
    return ParallelModule(model, groups, options, example=example, loss=loss, plan=plan)
