"""What the ranks of a pool run to test pipelines. Every function returns plain data."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopar
from tests.processes.compare import Built, build, full, loss_of, worst

Errors = dict[str, tuple[float, str]]


def train(
    name: str, names: tuple[str, ...], sizes: tuple[int, ...], dropout: float, options: dict[str, Any]
) -> dict[str, Any]:
    """Train a few clipped steps both ways; return losses, norms, errors of the state, and what this rank keeps."""
    built = build(name, dropout)
    model, args, kwargs = built
    mesh = autopar.Mesh(sizes, names)
    parallel = autopar.parallelize(model, mesh, args, kwargs, **options)
    ours = _train(parallel, built)
    state = parallel.full_state_dict()
    kept = [key for key, _ in parallel.named_parameters()]
    out: dict[str, Any] = {"ours": ours, "kept": kept, "errors": {}}
    if dist.get_rank() == 0:
        reference = build(name, dropout)[0]
        out["expected"] = _train(reference, built)
        out["errors"] = {"state": worst(state, dict(reference.state_dict()))}
        out["all"] = [key for key, _ in reference.named_parameters()]
        out["keys"] = list(state) == list(reference.state_dict())
    return out


def _train(module: nn.Module, built: Built, steps: int = 3) -> list[tuple[float, float]]:
    _, args, kwargs = built
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    out = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(module(*args, **kwargs))
        loss.backward()
        if isinstance(module, autopar.runtime.parallel_module.ParallelModule):
            norm = module.clip_grad_norm_(0.5)
        else:
            norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        out.append((float(full(loss.detach())), float(norm)))
    return out
