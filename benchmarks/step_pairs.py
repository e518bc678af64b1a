"""Predicted and measured step times of lowered programs here: four gloo processes, a profile made in the same run.

    python benchmarks/step_pairs.py --json rows.json

The machine is calibrated by all processes at once, since they share its cores. Then every model is planned in several
ways, lowered and run: forward and backward, no optimizer. Steps of all pairs take turns, so that what else runs on the
machine slows them alike, and the median counts. Printed are all pairs and the rank correlation.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import ConstraintError
from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.local_program import group_word
from autopar.passes.lower import lower
from autopar.passes.pipeline import make_plan
from autopar.passes.program import Program
from autopar.plans import Options, Plan
from autopar.runtime.calibrate import calibrate, describe, name_links
from autopar.runtime.groups import bind_groups
from benchmarks.fidelity import spearman
from benchmarks.models import families
from benchmarks.models.transformer import Transformer, TransformerConfig
from benchmarks.recipes import RECIPES, Inexpressible, recipe_constraints

RANKS = 4
IDS, FP32 = torch.int64, torch.float32
Inputs = tuple[tuple[tuple[int, ...], torch.dtype], ...]


class Mlp(nn.Module):
    """Three wide layers, the loss inside."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a scalar."""
        out: torch.Tensor = self.layers(x)
        return out.square().mean()


def _transformer(**sizes: Any) -> nn.Module:
    return Transformer(TransformerConfig(**sizes))


def _tokens(batch: int, length: int) -> Inputs:
    return (((batch, length), IDS),) * 2


MODELS: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "mlp": (partial(Mlp, 512, 1024), (((256, 512), FP32),)),
    "gpt": (
        partial(
            _transformer, layers=2, hidden=128, heads=4, kv_heads=4, channels=32, ffn=512, vocab=1024, sequence=64,
            dropout=0.1,
        ),
        _tokens(8, 64),
    ),
    "llama": (
        partial(
            _transformer, layers=2, hidden=256, heads=8, kv_heads=4, channels=32, ffn=704, vocab=2048, sequence=128,
            gated=True, rms_norm=True, rotary=True, tied=False,
        ),
        _tokens(8, 128),
    ),
    "bert": (
        partial(
            _transformer, layers=2, hidden=192, heads=4, kv_heads=4, channels=48, ffn=768, vocab=2048, sequence=64,
            causal=False,
        ),
        _tokens(16, 64),
    ),
    "resnet": (partial(families.ResNet, (1, 1), 16, 10), (((16, 3, 32, 32), FP32), ((16,), IDS))),
}  # fmt: skip


def programs() -> dict[str, Program]:
    """Return every model's annotated program."""
    out = {}
    for name, (build, inputs) in MODELS.items():
        with torch.device("meta"):
            model = build()
            args = tuple(torch.empty(shape, dtype=dtype) for shape, dtype in inputs)
        out[name] = annotate(capture(model, args, {}))
    return out


def plans(program: Program, mesh: Mesh) -> dict[str, Plan]:
    """Return the different plans of a program: autopar's own, everything replicated, and the recipes that fit."""
    asked: dict[str, dict[str, str]] = {"autopar": {}, "replicated": {"*": "replicate; zero0"}}
    for recipe in RECIPES:
        try:
            asked[recipe.title] = recipe_constraints(program, mesh, recipe)
        except Inexpressible:
            continue
    out: dict[str, Plan] = {}
    for title, constraints in asked.items():
        try:
            plan = make_plan(program, mesh, Options(constraints=constraints))
        except ConstraintError:
            continue
        if not any(plan.choices == other.choices and plan.routes == other.routes for other in out.values()):
            out[title] = plan
    return out


def run_ranks(body: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what ``body(rank, *args)`` returns in each of ``RANKS`` forked processes of one gloo group."""
    context = get_context("fork")
    store = tempfile.mktemp(prefix="step-pairs-")
    pipes, workers = [], []
    for rank in range(RANKS):
        here, there = context.Pipe()
        worker = context.Process(target=_serve, args=(rank, store, there, body, args))
        worker.start()
        there.close()
        pipes.append(here)
        workers.append(worker)
    found = [pipe.recv() for pipe in pipes]
    for worker in workers:
        worker.join()
    return found


def _serve(rank: int, store: str, pipe: Connection, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    pipe.send(body(rank, *args))
    dist.destroy_process_group()


def measure_profile(rank: int, path: str, budget_s: float) -> None:
    """Calibrate; the first rank writes the profile."""
    profile = name_links(calibrate("cpu", budget_s=budget_s), path)
    if rank == 0:
        Path(path).write_text(json.dumps(profile, indent=1))
        print(describe(profile, path), flush=True)


class Step:
    """One lowered program with made-up values in its placeholders."""

    def __init__(self, program: Program, plan: Plan, rank: int) -> None:
        local = lower(program, plan, plan.mesh.coordinate(rank))
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        groups = {group_word([axis]): name for axis in range(plan.mesh.num_axes)}
        self.forward = bind_groups(local.forward, groups, torch.device("cpu"))
        assert local.backward is not None
        self.backward = bind_groups(local.backward, groups, torch.device("cpu"))
        self.num_saved = local.num_saved
        self.values = [_made_up(node.meta["val"]) for node in local.forward.graph.nodes if node.op == "placeholder"]
        late = [node for node in local.backward.graph.nodes if node.op == "placeholder"][self.num_saved :]
        self.tangents = [torch.ones(node.meta["val"].shape, dtype=node.meta["val"].dtype) for node in late]

    def run(self) -> float:
        """Run forward and backward together with the other ranks; return the seconds."""
        dist.barrier()
        begin = time.perf_counter()
        with torch.no_grad():
            results = list(self.forward(list(self.values)))
            saved = results[len(results) - self.num_saved :]
            del results
            self.backward([*saved, *self.tangents])
        return time.perf_counter() - begin


def _made_up(value: torch.Tensor) -> torch.Tensor:
    if value.dtype.is_floating_point:
        return torch.rand(value.shape, dtype=value.dtype) * 0.1 + 0.01
    return torch.randint(0, 2, value.shape, dtype=value.dtype)


def measure_steps(rank: int, pairs: list[tuple[Program, Plan]], rounds: int) -> list[list[float]]:
    """Return the seconds of every pair in every round, as this rank saw them."""
    torch.manual_seed(rank)
    steps = [Step(program, plan, rank) for program, plan in pairs]
    for step in steps:
        step.run()
    gc.disable()
    return [[step.run() for step in steps] for _ in range(rounds)]


def compare(budget_s: float, rounds: int, profile: Path | None) -> list[dict[str, Any]]:
    """Return a row a pair: predicted and measured seconds."""
    captured = programs()
    path = str(profile) if profile else tempfile.mktemp(prefix="this-machine-", suffix=".json")
    if not Path(path).exists():
        run_ranks(measure_profile, path, budget_s)
    mesh = Mesh((RANKS,), ("ranks",), path, (f"{path}:group",))
    pairs = [(name, title, plan) for name in captured for title, plan in plans(captured[name], mesh).items()]
    found = run_ranks(measure_steps, [(captured[name], plan) for name, _, plan in pairs], rounds)
    rows = []
    for i, (name, title, plan) in enumerate(pairs):
        slowest = [max(rank[turn][i] for rank in found) for turn in range(rounds)]
        row = {"model": name, "plan": title, "predicted_s": plan.step_seconds, "measured_s": statistics.median(slowest)}
        row |= {"compute_s": plan.cost.compute_seconds, "collectives": len(plan.collectives), "ops": len(plan.choices)}
        rows.append(row)
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the rank correlation of all pairs, and the mean of those within a model."""
    predicted, measured = ([row[key] for row in rows] for key in ("predicted_s", "measured_s"))
    inside = []
    for name in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == name]
        if len(mine) > 2:
            inside.append(spearman([r["predicted_s"] for r in mine], [r["measured_s"] for r in mine]))
    known = [value for value in inside if value is not None]
    return {"spearman": spearman(predicted, measured), "within_models": statistics.mean(known) if known else None}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    lines = [f"{'model':8} {'plan':22} {'predicted':>10} {'measured':>10} {'compute':>10} collectives"]
    for row in rows:
        times = "".join(f" {row[key] * 1e3:7.2f} ms" for key in ("predicted_s", "measured_s", "compute_s"))
        lines.append(f"{row['model']:8} {row['plan']:22}{times} {row['collectives']:6}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Calibrate, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="for the calibration")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", type=Path, help="a profile to use, made here if it does not exist")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    given = parser.parse_args(arguments)
    rows = compare(given.seconds, given.rounds, given.profile)
    print(table(rows))
    print(f"{len(rows)} pairs, {summary(rows)}")
    if given.json:
        given.json.write_text(json.dumps({"rows": rows, **summary(rows)}, indent=1))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
