"""What a parallel module costs beside its steps: the time to the first step, and a thousand steps of one program."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar.mesh import Mesh
from autopar.plans import Plan
from benchmarks.models.transformer import Transformer, TransformerConfig
from benchmarks.speed_cases import Case

GPT2_SMALL = TransformerConfig(
    layers=12, hidden=768, heads=12, kv_heads=12, channels=64, ffn=3072, vocab=50257, sequence=64
)
"""GPT-2 small with short sequences: what is timed depends on the number of ops, not on the tokens."""

BATCH = 4
SETTLED = 0.2
"""The part of a soak after which nothing may grow any more."""


def plan_gpt2(mesh: Mesh) -> Plan:
    """Return the plan of GPT-2 small that ``first_step`` is given."""
    with torch.device("meta"):
        model = Transformer(GPT2_SMALL)
        tokens = torch.zeros((BATCH, GPT2_SMALL.sequence), dtype=torch.int64)
    return autopar.plan(model, mesh, (tokens, tokens))


def first_step(rank: int, mesh: Mesh, plan: Plan | None) -> dict[str, float]:
    """Return seconds from ``parallelize`` to the end of the first step of GPT-2 small, and its parts. Collective."""
    torch.manual_seed(0)
    with torch.device("cpu" if rank == 0 else "meta"):
        model = Transformer(GPT2_SMALL)
    tokens = torch.randint(
        0, GPT2_SMALL.vocab, (BATCH, GPT2_SMALL.sequence), generator=torch.Generator().manual_seed(1)
    )
    dist.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    parallel = autopar.parallelize(model, mesh, (tokens, tokens), plan=plan)
    ready = time.perf_counter()
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)
    _train(parallel, (tokens, tokens), optimizer)
    end = time.perf_counter()
    return {"parallelize_s": ready - begin, "to_first_step_s": end - begin, "cpu_s": time.process_time() - cpu}


def soak(rank: int, case: Case, plan: Plan, steps: int) -> dict[str, Any]:
    """Train many steps; return what the process held on the way, and how many programs there are. Collective."""
    inputs = case.make_inputs()
    parallel = autopar.parallelize(case.make_model(), plan.mesh, inputs, plan=plan)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4)
    rows = []
    for step in range(steps):
        _train(parallel, inputs, optimizer)
        if (step + 1) % max(1, steps // 20) == 0:
            gc.collect()
            rows.append({"step": step + 1, "resident_bytes": _resident_bytes(), "objects": len(gc.get_objects())})
    settled = [row for row in rows if row["step"] >= SETTLED * steps]
    return {
        "steps": steps,
        "rows": rows,
        "grown_bytes": settled[-1]["resident_bytes"] - settled[0]["resident_bytes"],
        "grown_objects": settled[-1]["objects"] - settled[0]["objects"],
        "programs": len(parallel._engine._executables),
    }


def _train(module: torch.nn.Module, inputs: tuple[Tensor, ...], optimizer: torch.optim.Optimizer) -> None:
    module(*inputs).backward()
    optimizer.step()
    optimizer.zero_grad()


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
