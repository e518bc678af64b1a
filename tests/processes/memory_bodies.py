"""What the ranks run to measure their memory."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.utils import _pytree as pytree

import autopar
from autopar.passes.annotate import annotate
from autopar.passes.complete_plan import complete_plan
from autopar.passes.cost.live_bytes import live_bytes
from autopar.passes.pipeline import make_plan
from autopar.passes.predict_memory import predict_memory
from autopar.placement import parse_layout
from autopar.runtime.execute import Executable
from autopar.runtime.measure_memory import MemoryMeter
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.pipeline_memory import staged_live_bytes
from autopar.runtime.shadow import Source
from autopar.runtime.signature import take_apart
from autopar.runtime.staged_executable import StagedExecutable
from tests.processes.compare import Built, build, loss_of, split


def measure_step(name: str, sizes: tuple[int, ...], options: dict[str, Any], again: bool = False) -> dict[str, Any]:
    """Train a step for the optimizer's state, then measure forward and backward; return both parts and peaks.

    A thread of gloo may hold what it sent a moment longer than the program does, so the least of six steps counts.

    Args:
        again: the whole forward is computed again in the backward.
    """
    built = build(name, 0.0)
    if again:
        options = {"plan": _computing_again(built, sizes)}
    parallel, _ = split(built, sizes, "best", **options)
    optimizer = torch.optim.AdamW(parallel.parameters())
    _step(parallel, built)
    optimizer.step()
    (executable,) = parallel._engine._executables.values()
    if isinstance(executable, StagedExecutable):
        predicted = staged_live_bytes(executable.program, executable.plan, executable._groups.stage.coordinate)
    else:
        predicted = live_bytes(executable.local, "adamw")
    measured = min((_measure(parallel, built, optimizer) for _ in range(6)), key=lambda found: found.peak_bytes)
    return {
        "predicted": predicted.peak_bytes,
        "measured": measured.peak_bytes,
        "predicted parts": predicted.parts,
        "measured parts": measured.parts,
        "plan": parallel.plan.memory.peak_bytes,
    }


def _computing_again(built: Built, sizes: tuple[int, ...]) -> autopar.Plan:
    model, args, kwargs = built
    mesh = autopar.Mesh(sizes, device="cpu")
    program = annotate(Source(model).capture(take_apart(model, args, kwargs, device=None), mesh, "global"))
    plan = make_plan(program, mesh)
    forward = [n.name for n in program.ops() if n.meta["phase"] == "forward" and n.op == "call_function"]
    layouts = {name: parse_layout(text) for name, text in plan.parameters.items()}
    made = complete_plan(program, mesh, plan.choices, layouts, recomputed=forward)
    assert made.recomputed
    return predict_memory(program, made)


def _step(parallel: ParallelModule, built: Built) -> Any:
    output = parallel(*built[1], **built[2])
    loss_of(output).backward()
    return output


def _measure(parallel: ParallelModule, built: Built, optimizer: torch.optim.Optimizer) -> Any:
    optimizer.zero_grad()
    gc.collect()
    meter = MemoryMeter()
    meter.hold_module(parallel, optimizer)
    meter.hold("inputs", _tensors(built[1:]))
    for executable in parallel._engine._executables.values():
        if isinstance(executable, Executable):
            meter.hold("saved", executable.kept_copies)
    with meter:
        output = parallel(*built[1], **built[2])
        meter.hold("outputs", _tensors(output))
        meter.hold_rest("saved")
        loss_of(output).backward()
    meter.hold("gradients", [parameter.grad for parameter in parallel.parameters()])
    return meter.result()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
