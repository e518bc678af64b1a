"""What the ranks of a pool run. Every function returns plain data; ``errors`` are relative differences by name."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.runtime.parallel_module import ParallelModule
from tests.processes.compare import Built, build, full, gradients, loss_of, split, state, worst

Errors = dict[str, tuple[float, str]]


@dataclass
class Trained:
    """What a training run came to: losses here and of one process, errors of tensors, and how the plan splits."""

    losses: list[float]
    expected: list[float]
    errors: Errors
    split_parameters: int
    collectives: int


def train(name: str, sizes: tuple[int, ...], dropout: float, how: str, steps: int = 3) -> Trained:
    """Train both ways, by a plan of the kind ``how`` (see ``split``); the reference on the first rank."""
    built = build(name, dropout)
    parallel, reference = split(built, sizes, how)
    plan = parallel.plan
    split_parameters = sum(any(p.is_shard() for p in placements) for placements in plan.placements.values())
    ours = list(_train(parallel, built, steps))
    first_gradients, after = ours[0][1], state(parallel)
    losses = [loss for loss, _ in ours]
    out = Trained(losses, losses, {}, split_parameters, len(plan.collectives))
    if dist.get_rank() != 0:
        return out
    expected = list(_train(reference, built, steps))
    out.expected = [loss for loss, _ in expected]
    out.errors = {
        "gradients": worst(first_gradients, expected[0][1]),
        "state": worst(after, state(reference)),
    }
    return out


def _train(module: nn.Module, built: Built, steps: int) -> Iterator[tuple[float, dict[str, Any]]]:
    _, args, kwargs = built
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(module(*args, **kwargs))
        loss.backward()
        found = gradients(module)
        optimizer.step()
        yield float(loss.detach()), found


def replicas_agree(name: str, sizes: tuple[int, ...], how: str) -> list[float]:
    """Train with AdamW, foreach; return the sums of all full parameters, which must be the same bits on every rank."""
    built = build(name, 0.1)
    parallel, _ = split(built, sizes, how)
    optimizer = torch.optim.AdamW(parallel.parameters(), foreach=True)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(parallel(*built[1], **built[2])).backward()
        optimizer.step()
    return [float(full(p.detach()).double().sum()) for p in parallel.parameters()]  # type: ignore[union-attr]


def round_trip(name: str, sizes: tuple[int, ...], how: str) -> dict[str, Any]:
    """Save and load by every way; return what must hold."""
    built = build(name)
    parallel, reference = split(built, sizes, how)
    full_state = parallel.full_state_dict()
    keys = list(parallel.state_dict()) == list(reference.state_dict())
    strict = str(reference.load_state_dict(full_state, strict=True))
    tied = [
        (a, b)
        for a, p in reference.named_parameters(remove_duplicate=False)
        for b, q in reference.named_parameters(remove_duplicate=False)
        if p is q and a < b
    ]
    ours = dict(parallel.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(-0.5)
    parallel.load_state_dict(reference.state_dict(), strict=True)
    loaded = worst(state(parallel), state(reference))
    plain = all(not isinstance(value, DTensor) for value in full_state.values())
    return {
        "keys": keys,
        "strict": strict,
        "tied": all(ours[a] is ours[b] for a, b in tied),
        "loaded": loaded,
        "plain": plain,
        "dcp": _distributed_checkpoint(parallel),
        "all DTensors": all(isinstance(p, DTensor) for p in parallel.parameters()),
    }


def _distributed_checkpoint(parallel: ParallelModule) -> tuple[float, str]:
    before = state(parallel)
    folder = [tempfile.mkdtemp(prefix="autopar-dcp-")]
    dist.broadcast_object_list(folder, 0)
    dcp.save({"model": parallel.state_dict()}, checkpoint_id=Path(folder[0]))
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.zero_()
    target = {"model": parallel.state_dict()}
    dcp.load(target, checkpoint_id=Path(folder[0]))
    parallel.load_state_dict(target["model"])
    return worst(state(parallel), before)


def modes_and_shapes(name: str, sizes: tuple[int, ...], how: str) -> tuple[Errors, int]:
    """Run a smaller batch, then eval and no_grad, then the first shape; return errors and the number of programs."""
    built = build(name)
    parallel, reference = split(built, sizes, how)
    _, args, kwargs = built
    small = tuple(_half(a) for a in args), {key: _half(value) for key, value in kwargs.items()}
    errors: Errors = {}
    for label, (a, k), training in (
        ("small", small, True),
        ("eval", (args, kwargs), False),
        ("first", (args, kwargs), True),
    ):
        for module in (parallel, reference):
            module.train(training)
            module.zero_grad()
        with torch.set_grad_enabled(training):
            ours, theirs = loss_of(parallel(*a, **k)), loss_of(reference(*a, **k))
        if training:
            ours.backward()
            theirs.backward()
            if dist.get_rank() == 0:
                errors[f"{label} gradients"] = worst(gradients(parallel), gradients(reference))
            else:
                gradients(parallel)
        errors[f"{label} loss"] = worst({"loss": ours.detach()}, {"loss": theirs.detach()})
        errors[f"{label} requires grad"] = (float(ours.requires_grad != training), "loss")
    return errors, len(parallel._engine._executables)


def _half(value: Any) -> Any:
    return value[: value.shape[0] // 2] if isinstance(value, torch.Tensor) and value.dim() else value
