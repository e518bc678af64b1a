"""What a user calls: ``plan`` and ``parallelize``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.arguments import (
    check_batch_norm,
    check_compile,
    check_examples,
    check_mesh,
    check_module,
    check_options,
    check_plan_source,
)
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
    at_once: bool = False,
    constraints: Mapping[str, str] | None = None,
    inputs: str = "global",
    outputs: str = "auto",
    micro_batches: int | None = None,
    schedule: str | None = None,
    cuts: Sequence[str] | None = None,
    batch_norm: str = "exact",
    disable: Sequence[str] = (),
    overlap: bool | None = None,
) -> Plan:
    """Find the best plan of a model on a mesh. Touches no data and needs no process group.

    Args:
        model: the module; it may be on the meta device. It is traced in its own mode and in the current grad mode.
        mesh: a ``DeviceMesh``, a ``Mesh``, a number of ranks or axis sizes; or a ``Cluster`` or its text
            (``"4x8 h100"``), for which the shape of the mesh, stages and micro-batches are searched.
        example_inputs: positional inputs: a tuple, a single tensor, or a dict of keyword inputs.
        kwargs: keyword inputs.
        loss: see ``parallelize``.
        optimizer: its name (``"adamw"``, ``"sgd"``, ``"adafactor"``, ``"adamw-mixed"`` with float32 masters, ...) or an
            ``OptimizerBytes``; it sets the state that a parameter costs.
        memory: budget a rank: bytes, or a text such as ``"40GB"``; None for no bound. It bounds what is kept:
            parameters, gradients, optimizer state, saved tensors; the plan also says what is alive at once.
        at_once: the budget bounds that too, temporaries and gathered copies included: planned with a reserve.
        constraints: pattern of a module or parameter -> technique or layout, as ``{"layers.*.up_proj": "column"}``.
        inputs: ``"global"`` when every rank will pass the global batch, ``"local"`` when it passes its share of dim 0
            over the first mesh axis; the example is of the same kind.
        outputs: ``"full"`` (plain tensors, all differentiable), ``"lie"`` (DTensors where they lie) or ``"auto"``:
            full, but beside a loss where they lie, and differentiated once a gradient reaches one. With micro-batches
            or stages ``"auto"`` leaves the outputs beside a loss out: None stands in their place.
        micro_batches: cut the batch (dim 0 of the inputs) into this many parts, which run one after the other; the
            result is that of the whole batch. By default as few as fit ``memory``, or four a stage where the mesh has
            an axis ``pp``.
        schedule: order of the stages' work: ``"gpipe"``, ``"1f1b"``, ``"interleaved_1f1b"``, ``"zero_bubble"`` or
            ``"zbv"``. It asks for stages, along whichever axis is best when no axis is named for them.
        cuts: where each stage but the first starts: paths of modules; by default where the schedule takes least time.
            They ask for stages too.
        batch_norm: ``"exact"``: statistics of the whole batch, which micro-batches can't have: they are then refused;
            ``"per_micro_batch"``: each micro-batch is normalised by its own, as in gradient accumulation; running
            statistics move once a step, towards the mean over the micro-batches.
        disable: names of passes over the lowered program that are left out, such as ``["bucket_collectives"]``; they
            change when collectives run, never what comes out (docs/graph_passes.md).
        overlap: price parameters that are gathered ahead and gradients that are reduced behind as hidden by the compute
            of their region, on devices that can: True, False, or by default where the plan that is best by such prices
            is proved to be at little cost. With True it may come back with a gap: many plans balance compute and
            transfers.

    An axis of the mesh that is called ``pp``, or that ``Mesh(..., pipeline=)`` names, is the pipeline axis: each of its
    ranks has its own part of the model. Where none is, any axis becomes it when that saves more than 5 % of a
    predicted step, or when nothing fits ``memory`` without; ``plan.search`` tells what was tried, or why nothing was.
    ``Mesh(..., pipeline="")`` rules stages out. Stages that nobody asked for are not tried where they would change what
    a call returns: without a loss, with ``outputs=``, or with outputs beside the loss; nor with ``inputs="local"``.

    Raises:
        MeshError, OptionError, CaptureError, ConstraintError, InfeasibleError: each says what to do.
    """
    from autopar.passes.pipeline_plan import stage_mesh
    from autopar.passes.plan_cluster import plan_cluster
    from autopar.runtime.choose_axis import choose_axis
    from autopar.runtime.pipeline_memory import predict_staged_memory
    from autopar.runtime.shadow import Source
    from autopar.runtime.signature import take_apart

    check_module(model)
    cluster = Cluster(mesh) if isinstance(mesh, str) else mesh
    grid = check_mesh(cluster)
    options = check_options(
        optimizer,
        memory,
        constraints,
        inputs,
        outputs,
        micro_batches=micro_batches,
        schedule=schedule,
        cuts=cuts,
        at_once=at_once,
        norms=check_batch_norm(batch_norm, model),
        disable=disable,
        overlap=overlap,
    )
    args, named = check_examples(example_inputs, kwargs)
    source = Source.of(model, loss) if loss is not None else Source(model)
    call = take_apart(model, args, named, device=None)
    program = source.capture(call, stage_mesh(grid), inputs, every_output=outputs == "full")
    if isinstance(cluster, Cluster):
        return predict_staged_memory(program, plan_cluster(program, cluster.hardware, options, grid))
    return choose_axis(program, grid, options)


_search = plan  # the parameter of parallelize hides the function


def parallelize(
    model: torch.nn.Module,
    mesh: DeviceMesh | Mesh | Cluster | str | int | tuple[int, ...],
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    optimizer: str | OptimizerBytes = "adamw",
    memory: int | float | str | None = None,
    at_once: bool = False,
    constraints: Mapping[str, str] | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    inputs: str = "global",
    outputs: str = "auto",
    micro_batches: int | None = None,
    schedule: str | None = None,
    cuts: Sequence[str] | None = None,
    batch_norm: str = "exact",
    disable: Sequence[str] = (),
    overlap: bool | None = None,
    compile: bool = False,
) -> ParallelModule:
    """Return ``model`` as a module that runs on all ranks of ``mesh``. Every rank calls it, as under ``torchrun``.

    Parameter values come from the first rank of the mesh; the other ranks may hold any values, or meta tensors.

    Args:
        model: the module; it is not changed, and not needed afterwards.
        mesh: a ``DeviceMesh``, a ``Mesh``, a number of ranks or axis sizes; or a ``Cluster`` or its text such as
            ``"4x8 h100"``: with example inputs its shape, stages and micro-batches are searched; with a plan they are
            those of the plan.
        example_inputs, example_kwargs: inputs to plan for, as in ``plan``; without them the first call is the example.
        loss: callable applied to what the module returns. Its required parameters beyond the first take the last
            positional inputs of a call: with ``loss=torch.nn.functional.cross_entropy``, ``model(x, y)`` is
            ``cross_entropy(original(x), y)``.
        optimizer, memory, at_once, constraints, inputs, outputs, micro_batches, schedule, cuts, batch_norm, disable,
            overlap: as in ``plan``. A mesh with an axis ``pp`` needs example inputs, since every rank keeps the
            parameters of its own stages alone. With example inputs any axis may become the pipeline axis, as in
            ``plan``, and a warning says so; without them none does that is not named.
        plan: a plan made before, or the path of a saved one: nothing is solved then.
        compile: compile what each rank computes between its collectives by Inductor, at the first step; equal layers
            once. The memory that a plan predicts is that of the program as it is.

    Raises:
        MeshError: the mesh does not fit the world, or there is no process group.
        PlanError: ``plan`` was made for another model, mesh or inputs, or its file is damaged.
        OptionError, CaptureError, ConstraintError, InfeasibleError: each says what to do.
        An error on one rank is raised on every rank.
    """
    from autopar.runtime.choose_mesh import choose_mesh
    from autopar.runtime.groups import connect
    from autopar.runtime.parallel_module import ParallelModule

    groups = connect(mesh if isinstance(mesh, DeviceMesh) else partial(check_mesh, mesh))
    with groups.together("the arguments of parallelize"):
        if isinstance(model, ParallelModule):
            raise OptionError("the model runs in parallel already; parallelize the original, and only once")
        check_module(model)
        check_plan_source(plan)
        check_compile(compile)
        options = check_options(
            optimizer,
            memory,
            constraints,
            inputs,
            outputs,
            micro_batches=micro_batches,
            schedule=schedule,
            cuts=cuts,
            at_once=at_once,
            norms=check_batch_norm(batch_norm, model),
            disable=disable,
            overlap=overlap,
        )
        if example_inputs is None and example_kwargs is None:
            example = None
        else:
            example = check_examples(example_inputs, example_kwargs)
        if example is not None and not example[0] and not example[1]:
            raise OptionError("the example inputs are empty; give them, or leave them out to trace at the first call")
    if isinstance(mesh, (str, Cluster)) and (plan is not None or example is not None):
        groups, plan = choose_mesh(
            groups,
            plan,
            lambda: _search(
                model,
                mesh,
                *(example or ()),
                loss=loss,
                optimizer=optimizer,
                memory=memory,
                at_once=at_once,
                constraints=constraints,
                inputs=inputs,
                outputs=outputs,
                micro_batches=micro_batches,
                schedule=schedule,
                cuts=cuts,
                batch_norm=batch_norm,
                disable=disable,
                overlap=overlap,
            ),
        )
    return ParallelModule(model, groups, options, example=example, loss=loss, plan=plan, compile=compile)
