"""How good plans are: autopar's beside hand-written recipes, priced by the same model within the same memory.

    python benchmarks/plan_quality.py --json rows.json                     # every model on every cluster
    python benchmarks/plan_quality.py --model vit-large --cluster "8 a100 as 2x4"

A recipe is given as constraints (``benchmarks/recipes.py``) and solved for everything that it leaves open, under the
same fold of repeated layers. A row says by how much autopar's plan is faster than the best recipe that fits, and what
bounds it. Models have their real widths, and some of their layers with that part of a device's memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import ConstraintError, InfeasibleError
from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.cost.devices import device
from autopar.passes.pipeline import make_plan
from autopar.passes.program import Program
from autopar.plans import Options, Plan
from benchmarks.models import families
from benchmarks.models.transformer import Transformer, TransformerConfig
from benchmarks.recipes import RECIPES, Inexpressible, Recipe, recipe_constraints

SLOWER = 1e-6
"""How much slower than a recipe a plan may come out, relative: the solver's own tolerance."""

Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]
IDS, BF16, FP32 = torch.int64, torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        build: returns the module.
        inputs: shape without its batch, and dtype, of every input.
        batch: samples for each device; a fraction when a sample is too long for one.
        dtype: of the parameters.
        share: of a device's memory that it may use.
    """

    build: Callable[[], nn.Module]
    inputs: Shapes
    batch: float
    dtype: torch.dtype = BF16
    share: float = 1.0

    def program(self, num_ranks: int) -> Program:
        """Return the annotated program of a step on ``num_ranks`` devices."""
        batch = max(1, round(self.batch * num_ranks))
        with torch.device("meta"):
            model = self.build().to(self.dtype)
            args = tuple(torch.empty((batch, *shape), dtype=dtype) for shape, dtype in self.inputs)
        return annotate(capture(model, args, {}))


def _decoder(**sizes: Any) -> Callable[[], nn.Module]:
    return lambda: Transformer(TransformerConfig(**sizes))


LLAMA = {"gated": True, "rms_norm": True, "rotary": True, "tied": False}
TOKENS: Callable[[int], Shapes] = lambda length: (((length,), IDS),) * 2  # noqa: E731

CASES: dict[str, Case] = {
    "llama-1b": Case(
        _decoder(
            layers=2, hidden=2048, heads=32, kv_heads=8, channels=64, ffn=8192, vocab=128256, sequence=2048, **LLAMA
        ),
        TOKENS(2048),
        2,
        share=2 / 16,
    ),
    "llama-8b": Case(
        _decoder(
            layers=2, hidden=4096, heads=32, kv_heads=8, channels=128, ffn=14336, vocab=128256, sequence=4096, **LLAMA
        ),
        TOKENS(4096),
        1,
        share=0.15,
    ),
    "gpt-medium": Case(
        _decoder(
            layers=2, hidden=1024, heads=16, kv_heads=16, channels=64, ffn=4096, vocab=50304, sequence=1024, dropout=0.1
        ),
        TOKENS(1024),
        4,
        share=2 / 24,
    ),
    "bert-large": Case(
        _decoder(
            layers=2, hidden=1024, heads=16, kv_heads=16, channels=64, ffn=4096, vocab=30528, sequence=512, causal=False
        ),
        TOKENS(512),
        8,
        share=2 / 24,
    ),
    "translator": Case(
        partial(families.EncoderDecoder, layers=2, hidden=1024, heads=16, ffn=4096, vocab=32128, sequence=512),
        (((512,), IDS),) * 3,
        4,
        share=2 / 12,
    ),
    "vit-large": Case(
        partial(
            families.VisionTransformer,
            layers=2, hidden=1024, heads=16, ffn=4096, classes=1000, image=224, patch=16,
        ),
        (((3, 224, 224), BF16), ((), IDS)),
        16,
        share=2 / 24,
    ),
    "resnet-14": Case(
        partial(families.ResNet, depths=(1, 1, 1, 1), width=64, classes=1000), (((3, 224, 224), BF16), ((), IDS)), 32
    ),
    "recommender": Case(
        partial(families.Recommender, tables=8, rows=2_000_000, width=128, dense=16, hidden=(4096, 4096, 1024)),
        (((16,), FP32), ((8,), IDS), ((), FP32)),
        2048,
        FP32,
    ),
    "experts": Case(
        partial(
            families.ExpertDecoder, layers=2, hidden=1024, heads=16, ffn=4096, experts=16, vocab=32000, sequence=1024
        ),
        TOKENS(1024),
        2,
        share=2 / 8,
    ),
    "llama-long": Case(
        _decoder(
            layers=2, hidden=2048, heads=16, kv_heads=8, channels=128, ffn=5632, vocab=32000, sequence=32768, **LLAMA
        ),
        TOKENS(32768),
        1 / 4,
        share=2 / 4,
    ),
}  # fmt: skip

CLUSTERS: dict[str, Mesh] = {
    "8 h100": Mesh((8,), ("device",), "h100", ("nvlink4",)),
    "2x8 h100": Mesh((2, 8), ("node", "device"), "h100", ("infiniband_400", "nvlink4")),
    "4x8 h100": Mesh((4, 8), ("node", "device"), "h100", ("infiniband_400", "nvlink4")),
    "8 a100 as 2x4": Mesh((2, 4), ("data", "model"), "a100", ("nvlink3", "nvlink3")),
    "16x8 v100-32gb, ethernet": Mesh((16, 8), ("node", "device"), "v100-32gb", ("ethernet_25/8", "nvlink2")),
    "8 rtx4090, pcie": Mesh((8,), ("device",), "rtx4090", ("pcie4_host",)),
    "4x4 l4, ethernet": Mesh((4, 4), ("node", "device"), "l4", ("ethernet_50/4", "pcie4_host")),
}


def solve(program: Program, mesh: Mesh, budget: int | None, recipe: Recipe | None = None) -> Plan:
    """Return the best plan within a recipe, or of all; raises when there is none.

    Without a bound everything is kept, gathered parameters as well: that is what ZeRO-1 and ZeRO-2 do.
    """
    constraints = {} if recipe is None else recipe_constraints(program, mesh, recipe)
    if recipe is None or recipe.zero != 2:
        return make_plan(program, mesh, Options(memory=budget, constraints=constraints))
    plan = make_plan(program, mesh, Options(constraints=constraints))
    if budget is not None and plan.memory.total_bytes > budget:
        raise InfeasibleError("what is kept does not fit", plan.memory.total_bytes)
    return plan


def price_recipes(program: Program, mesh: Mesh, budget: int | None) -> dict[str, dict[str, Any]]:
    """Return the seconds and bytes of every recipe, or why it has none; equal ones are solved once."""
    out: dict[str, dict[str, Any]] = {}
    asked: dict[tuple[int, str], str] = {}
    for recipe in RECIPES:
        try:
            key = (recipe.zero, repr(recipe_constraints(program, mesh, recipe)))
            found = out[asked[key]] if key in asked else _priced(solve(program, mesh, budget, recipe))
            asked.setdefault(key, recipe.title)
        except (Inexpressible, ConstraintError) as error:
            found = {"why": f"not expressible: {error}"}
        except InfeasibleError as error:
            found = {"why": "does not fit", "least_bytes": error.least_bytes}
        out[recipe.title] = found
    return out


def _priced(plan: Plan) -> dict[str, Any]:
    return {"seconds": plan.step_seconds, "bytes": plan.memory.total_bytes, "status": plan.solver.status}


def bottleneck(plan: Plan) -> str:
    """Return what takes most of a plan's time: compute, or one kind of collective over one axis, with its share."""
    parts: dict[str, float] = defaultdict(float)
    parts["compute"] = plan.cost.compute_seconds
    for row in plan.collectives:
        parts[f"{row.kind} over {plan.mesh.names[row.axis]}"] += row.seconds
    name = max(parts, key=lambda key: parts[key])
    return f"{name} {parts[name] / plan.step_seconds:.0%}"


def compare(program: Program, mesh: Mesh, budget: int | None) -> dict[str, Any]:
    """Return a row: autopar's plan, every recipe, and the ratio of the best recipe to autopar."""
    row: dict[str, Any] = {"budget_bytes": budget}
    try:
        plan = solve(program, mesh, budget)
    except InfeasibleError as error:
        return {**row, "why": "does not fit", "least_bytes": error.least_bytes}
    row |= {"seconds": plan.step_seconds, "bytes": plan.memory.total_bytes, "bottleneck": bottleneck(plan)}
    row |= {"status": plan.solver.status, "gap": plan.solver.gap}
    row["recipes"] = price_recipes(program, mesh, budget)
    priced = {title: found["seconds"] for title, found in row["recipes"].items() if "seconds" in found}
    if priced:
        best = min(priced, key=lambda title: priced[title])
        row |= {"best": best, "ratio": priced[best] / plan.step_seconds}
        row["slower"] = row["ratio"] < 1 - SLOWER
    return row


def table(row: dict[str, Any]) -> str:
    """Return a row as text."""
    lines = [f"{row['model']} on {row['cluster']}, {row['budget_bytes'] / 1e9:.0f} GB a device"]
    if "why" in row:
        return f"{lines[0]}: {row['why']}, {row['least_bytes'] / 1e9:.1f} GB needed"
    lines.append(f"  {'autopar':28} {row['seconds'] * 1e3:9.2f} ms {row['bytes'] / 1e9:7.1f} GB  {row['bottleneck']}")
    if row["status"] != "optimal":
        lines[-1] += f" ({row['status']}, gap {row['gap']:.1%})"
    for title, found in row["recipes"].items():
        if "seconds" not in found:
            need = f", {found['least_bytes'] / 1e9:.1f} GB needed" if found.get("least_bytes") else ""
            lines.append(f"  {title:28} {found['why']}{need}")
            continue
        times = found["seconds"] / row["seconds"]
        lines.append(f"  {title:28} {found['seconds'] * 1e3:9.2f} ms {found['bytes'] / 1e9:7.1f} GB  {times:5.2f} x")
    if row.get("slower"):
        lines.append(f"  SLOWER than {row['best']}")
    return "\n".join(lines)


def matrix(rows: list[dict[str, Any]]) -> str:
    """Return the ratios of all rows, a line a model, with the recipe that came nearest to autopar."""
    clusters = [name for name in CLUSTERS if any(row["cluster"] == name for row in rows)]
    lines = ["| model | " + " | ".join(clusters) + " |", "| --- " * (len(clusters) + 1) + "|"]
    for model in dict.fromkeys(row["model"] for row in rows):
        cells = []
        for cluster in clusters:
            found = next((row for row in rows if (row["model"], row["cluster"]) == (model, cluster)), {})
            cells.append(f"{found['ratio']:.2f} {found['best']}" if "ratio" in found else found.get("why", ""))
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Compare what is asked for; print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=sorted(CASES))
    parser.add_argument("--cluster", action="append", choices=list(CLUSTERS))
    parser.add_argument("--json", type=Path, help="where to write the rows")
    given = parser.parse_args(arguments)
    rows = []
    for name in given.model or CASES:
        programs: dict[int, Program] = {}
        for cluster in given.cluster or CLUSTERS:
            mesh = CLUSTERS[cluster]
            if mesh.num_ranks not in programs:
                programs[mesh.num_ranks] = CASES[name].program(mesh.num_ranks)
            row = {"model": name, "cluster": cluster}
            budget = int(CASES[name].share * device(mesh.device).memory_bytes)
            rows.append(row | compare(programs[mesh.num_ranks], mesh, budget))
            print(table(rows[-1]), flush=True)
            if given.json:
                given.json.write_text(json.dumps({"rows": rows}, indent=1))
    print(matrix(rows))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
