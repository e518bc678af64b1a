"""The arguments of the public functions: checked before anything is traced, and turned into core records."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.cluster import Cluster
from autopar.errors import MeshError, OptionError
from autopar.mesh import Mesh
from autopar.passes.cost.memory import OptimizerBytes, known_optimizers, optimizer_bytes
from autopar.plans import Options

INPUTS = ("global", "local")
OUTPUTS = ("auto", "full", "lie")

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def check_mesh(mesh: Any) -> Mesh:
    """Return the grid that ``mesh`` means: a ``DeviceMesh``, a ``Mesh``, a ``Cluster`` or its text, a size or several.

    Raises:
        MeshError: it is none of these, or a size is not positive.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, DeviceMesh):
        return Mesh.from_device_mesh(mesh)
    if isinstance(mesh, int) and not isinstance(mesh, bool):
        return Mesh((mesh,))
    if isinstance(mesh, str):
        return Cluster(mesh).mesh()
    if isinstance(mesh, Cluster):
        return mesh.mesh()
    if isinstance(mesh, Sequence) and all(isinstance(n, int) and not isinstance(n, bool) for n in mesh):
        return Mesh(tuple(mesh))
    raise MeshError(
        f"mesh= takes a torch DeviceMesh, an autopar.Mesh, an autopar.Cluster or its text such as '4x8 h100', "
        f"a number of ranks or a tuple of them; got {mesh!r}"
    )


def check_memory(memory: Any) -> int | None:
    """Return a budget in bytes: of a number of bytes, or of a text such as ``"40GB"`` or ``"512 MiB"``.

    Raises:
        OptionError: it is not positive, not finite, or not a size.

    >>> check_memory("1.5KiB")
    1536
    """
    if memory is None:
        return None
    if isinstance(memory, str):
        match = _SIZE.fullmatch(memory)
        unit = match.group(2).upper() or "B" if match else ""
        if match is None or unit not in _UNITS:
            raise OptionError(f"memory={memory!r} is no size; write bytes, or a number with a unit: '40GB', '512MiB'")
        memory = float(match.group(1)) * _UNITS[unit]
    if isinstance(memory, bool) or not isinstance(memory, (int, float)):
        raise OptionError(f"memory= takes bytes a rank or a text such as '40GB'; got {memory!r}")
    if not math.isfinite(memory) or memory < 1:
        raise OptionError(f"memory={memory!r} is no budget; give at least one byte a rank, or None for no bound")
    return int(memory)


def check_optimizer(optimizer: Any) -> str:
    """Return the name of an optimizer whose state can be counted, or the text of an ``OptimizerBytes``.

    Raises:
        OptionError: it is none of these.
    """
    if isinstance(optimizer, (str, OptimizerBytes)):
        return str(optimizer_bytes(str(optimizer)))
    raise OptionError(
        f"optimizer= takes the name of the optimizer whose state is counted, one of {known_optimizers()}, or an "
        f"OptimizerBytes; "
        f"got {type(optimizer).__name__}. Build the optimizer itself from the parallel module's parameters"
    )


def check_tolerance(rtol: Any) -> float | None:
    """Return a relative tolerance, or None.

    Raises:
        OptionError: it is not a positive finite number: every comparison with NaN would hold.
    """
    if rtol is None:
        return None
    if isinstance(rtol, bool) or not isinstance(rtol, (int, float)) or not 0 < rtol < math.inf:
        raise OptionError(f"rtol={rtol!r} is no tolerance; give a positive number such as 1e-4, or None")
    return float(rtol)


def check_micro_batches(micro_batches: Any) -> int | None:
    """Return a number of micro-batches, or None.

    Raises:
        OptionError: it is no positive whole number.
    """
    if micro_batches is None:
        return None
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise OptionError(
            f"micro_batches={micro_batches!r} is no number of parts of the batch; give a positive whole number, or None"
        )
    return micro_batches


def check_schedule(schedule: Any) -> str:
    """Return the name of a pipeline schedule; empty for None.

    Raises:
        OptionError: it is none of those known.
    """
    from autopar.passes.schedules import SCHEDULES

    if schedule is None or (isinstance(schedule, str) and schedule in ("", *SCHEDULES)):
        return schedule or ""
    raise OptionError(f"schedule={schedule!r} is unknown; use one of {', '.join(map(repr, SCHEDULES))}")


def check_cuts(cuts: Any) -> tuple[str, ...]:
    """Return where stages start; empty for None.

    Raises:
        OptionError: it is no list of texts.
    """
    if cuts is None:
        return ()
    if isinstance(cuts, str) or not isinstance(cuts, Sequence) or not all(isinstance(cut, str) for cut in cuts):
        raise OptionError(
            "cuts= takes a list of modules at which the next stage starts, such as ['layers.8', 'layers.16']; "
            f"got {cuts!r}"
        )
    return tuple(cuts)


def check_batch_norm(batch_norm: Any, model: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of the batch norms that may take the statistics of each micro-batch.

    Raises:
        OptionError: the option means nothing.
    """
    if batch_norm == "exact":
        return ()
    if batch_norm != "per_micro_batch":
        raise OptionError(f"batch_norm={batch_norm!r} is unknown; use 'exact' or 'per_micro_batch'")
    kinds = (torch.nn.modules.batchnorm._BatchNorm,)
    return tuple(name for name, module in model.named_modules() if isinstance(module, kinds))


def check_compile(compile: Any) -> bool:
    """Return whether to compile.

    Raises:
        OptionError: it is neither True nor False.
    """
    if not isinstance(compile, bool):
        raise OptionError(f"compile= takes True or False; got {compile!r}")
    return compile


def check_disable(disable: Any) -> tuple[str, ...]:
    """Return the names of the passes to leave out, sorted.

    Raises:
        OptionError: it is no list of texts, or a name is unknown.
    """
    from autopar.passes.improve.improve import check_names

    if isinstance(disable, str) or not isinstance(disable, Sequence) or not all(isinstance(n, str) for n in disable):
        raise OptionError(f"disable= takes a list of names of passes, such as ['bucket_collectives']; got {disable!r}")
    check_names(disable)
    return tuple(sorted(set(disable)))


def check_options(
    optimizer: Any,
    memory: Any,
    constraints: Any,
    inputs: Any,
    outputs: Any,
    pinned: Mapping[str, str] | None = None,
    *,
    micro_batches: Any = None,
    schedule: Any = None,
    cuts: Any = None,
    at_once: Any = False,
    norms: tuple[str, ...] = (),
    disable: Any = (),
    overlap: Any = None,
) -> Options:
    """Return the options of a plan.

    Raises:
        OptionError: a value means nothing.
    """
    optimizer = check_optimizer(optimizer)
    for name, value, known in (("inputs", inputs, INPUTS), ("outputs", outputs, OUTPUTS)):
        if not isinstance(value, str) or value not in known:
            raise OptionError(f"{name}={value!r} is unknown; use one of {', '.join(map(repr, known))}")
    if not isinstance(at_once, bool) or (at_once and memory is None):
        raise OptionError(
            f"at_once={at_once!r} asks that all fits into memory= at once: give a budget, and True or False"
        )
    if overlap is not None and not isinstance(overlap, bool):
        raise OptionError(
            f"overlap={overlap!r} means nothing; use True to price what can hide as hidden, False to price nothing so, "
            "or leave it out"
        )
    constraints = {} if constraints is None else constraints
    if not isinstance(constraints, Mapping) or not all(
        isinstance(key, str) and isinstance(value, str) for key, value in constraints.items()
    ):
        raise OptionError(
            f"constraints= takes a dict from pattern to technique, such as {{'layers.*.up_proj': 'column'}}; "
            f"got {constraints!r}"
        )
    return Options(
        optimizer=optimizer,
        memory=check_memory(memory),
        constraints=dict(sorted(constraints.items())),
        inputs=inputs,
        outputs=outputs,
        pinned=dict(sorted((pinned or {}).items())),
        micro_batches=check_micro_batches(micro_batches),
        schedule=check_schedule(schedule),
        cuts=check_cuts(cuts),
        at_once=at_once,
        norms=norms,
        disable=check_disable(disable),
        overlap=overlap,
    )


def check_examples(example_inputs: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return ``(args, kwargs)`` of example inputs: a tuple, a list, a single tensor, or a dict of keyword inputs.

    Keyword inputs come back sorted by name, so that the order in which they are written never matters.

    Raises:
        OptionError: they are none of these.
    """
    if kwargs is not None and (not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs)):
        raise OptionError(f"keyword example inputs come as a dict from name to value; got {type(kwargs).__name__}")
    named = dict(kwargs or {})
    if example_inputs is None:
        args: tuple[Any, ...] = ()
    elif isinstance(example_inputs, torch.Tensor):
        args = (example_inputs,)
    elif isinstance(example_inputs, Mapping):
        if named:
            raise OptionError("example_inputs is a dict and keyword inputs are given too; put all into one of them")
        args, named = (), dict(example_inputs)
    elif isinstance(example_inputs, (tuple, list)):
        args = tuple(example_inputs)
    else:
        raise OptionError(
            "example_inputs takes a tuple of the module's positional inputs, a single tensor, or a dict of keyword "
            f"inputs; got {type(example_inputs).__name__}"
        )
    return args, dict(sorted(named.items()))


def check_module(model: Any) -> torch.nn.Module:
    """Return ``model``.

    Raises:
        OptionError: it is no module.
    """
    if not isinstance(model, torch.nn.Module):
        raise OptionError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    return model


def check_plan_source(plan: Any) -> Any:
    """Return ``plan``: None, a ``Plan``, or the path of a saved one.

    Raises:
        OptionError: it is none of these.
    """
    return None if plan is None else check_plan(plan)


def check_plan(plan: Any) -> Any:
    """Return ``plan``: a ``Plan``, or the path of a saved one.

    Raises:
        OptionError: it is neither.
    """
    from autopar.plans import Plan

    if isinstance(plan, (Plan, str, os.PathLike)):
        return plan
    raise OptionError(f"plan= takes an autopar.Plan or the path of a saved one; got {type(plan).__name__}")
