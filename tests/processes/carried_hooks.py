"""What the ranks of a pool run: hooks on parameters. Returns plain data."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn

from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.complete_plan import complete_plan
from benchmarks.memory import batch_choices
from tests.processes.compare import build, gradients, loss_of, split, state, worst

Errors = dict[str, tuple[float, str]]


def hooks_on_parameters(sizes: tuple[int, ...]) -> Errors:
    """Train data parallel with hooks from before ``parallelize`` and from after it, two backwards a step."""
    built = build("mlp")
    model, args, kwargs = built
    parameters = list(model.parameters())
    mask = torch.arange(parameters[0].numel()).reshape(parameters[0].shape).remainder(3).float()
    seen: dict[int, int] = {0: 0, 1: 0}

    def watch(module: nn.Module, number: int) -> None:
        early = list(module.parameters())
        early[0].register_hook(lambda gradient: gradient * mask * 2)  # a plain tensor of the whole shape
        early[1].register_hook(lambda gradient: gradient / (gradient.norm() + 1e-3))
        early[2].register_hook(lambda gradient: gradient.clamp_(-1e-3, 1e-3))
        early[-1].register_post_accumulate_grad_hook(lambda p: seen.update({number: seen[number] + 1}))

    reference = copy.deepcopy(model)
    watch(model, 0)
    watch(reference, 1)
    program = annotate(capture(model, args, kwargs))
    plan = complete_plan(program, Mesh(sizes), batch_choices(program), {})
    parallel, _ = split(built, sizes, plan=plan)
    for module in (parallel, reference):
        next(iter(module.parameters())).register_hook(lambda gradient: gradient * 5)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        for _ in range(3):
            for _ in range(2):
                loss_of(module(*args, **kwargs)).backward()
            optimizer.step()
            optimizer.zero_grad()
        loss_of(module(*args, **kwargs)).backward()
    errors = {
        "gradients": worst(gradients(parallel), gradients(reference)),
        "state": worst(state(parallel), state(reference)),
        "calls": (float(seen != {0: 7, 1: 7}), f"calls of a hook: {seen}"),
    }
    return errors if dist.get_rank() == 0 else {}
