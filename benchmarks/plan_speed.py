"""How long planning takes, by pass: GPT-2 small and Llama-3-8B on meshes of one, two and three axes.

    python benchmarks/plan_speed.py                                      # every case
    python benchmarks/plan_speed.py --case llama3-8b --mesh 32,8 --layers 4 --json rows.json

CPU seconds count the process and its children; nothing is timed on the wall, because cores are shared.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from autopar.errors import InfeasibleError
from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.cost.fusion import mark_traffic
from autopar.passes.emit_plan import emit_plan
from autopar.passes.fold import fold
from autopar.passes.lower import lower
from autopar.passes.solve.decide import decide
from autopar.passes.solve.layout_graph import Prices
from autopar.passes.solve.problem import build_problem
from autopar.plans import Options

CASES: dict[str, list[str]] = {"gpt2": ["8", "2,4"], "llama3-8b": ["8", "32,8", "4,8,8"]}
DEVICE = "h100"
COLUMNS = (
    "memory_bytes",
    "capture_cpu_s", "annotate_cpu_s", "enumerate_cpu_s", "build_cpu_s", "solve_cpu_s", "lower_cpu_s", "total_cpu_s",
    "variables", "constraints", "peak_rss_bytes", "status", "gap", "objective_s",
)  # fmt: skip

T = TypeVar("T")


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its children so far."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in used)


def build_case(case: str, batch: int, layers: int | None) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return a model on the meta device with its example inputs."""
    if case == "llama3-8b":
        from benchmarks.models.llama import LlamaConfig, build

        model, args = build(LlamaConfig(layers=layers or 32), batch)
        return model, args, {}
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=layers or 12, use_cache=False)).train()
        tokens = torch.empty((batch, 1024), dtype=torch.int64)
    return model, (), {"input_ids": tokens, "labels": tokens}


def measure(case: str, sizes: tuple[int, ...], layers: int | None, memory: int | None) -> dict[str, Any]:
    """Plan one case within the budget, by default the device's own memory, and return its row.

    Where no plan fits the device (nothing is computed again, so a long batch is saved whole), it is planned without.
    """
    if memory is not None:
        return measure_within(case, sizes, layers, memory or None)
    try:
        return measure_within(case, sizes, layers, Prices.of(Mesh(sizes, device=DEVICE)).device.memory_bytes)
    except InfeasibleError as error:
        print(f"{case} on {sizes}: planned without a budget, because {error}", flush=True)
        return measure_within(case, sizes, layers, None)


def measure_within(case: str, sizes: tuple[int, ...], layers: int | None, budget: int | None) -> dict[str, Any]:
    """Plan one case within a budget in bytes a rank, or without one; return its row."""
    model, args, kwargs = build_case(case, 2 * sizes[0], layers)
    mesh = Mesh(sizes, device=DEVICE)
    prices = Prices.of(mesh)
    options = Options(memory=budget)
    row: dict[str, Any] = {"case": case, "mesh": ",".join(map(str, sizes)), "layers": layers or default_layers(case)}
    row["memory_bytes"] = budget
    begin = cpu_seconds()

    def timed(column: str, work: Callable[[], T]) -> T:
        start = cpu_seconds()
        out = work()
        row[column] = round(row.get(column, 0.0) + cpu_seconds() - start, 3)
        return out

    program = timed("capture_cpu_s", lambda: capture(model, args, kwargs))
    timed("annotate_cpu_s", lambda: annotate(program))
    folding = timed("enumerate_cpu_s", lambda: fold(program))
    timed("annotate_cpu_s", lambda: mark_traffic(program, folding.class_of))
    problem = timed("enumerate_cpu_s", lambda: build_problem(program, prices, options, folding))
    columns = {"reduce": "enumerate_cpu_s", "build": "build_cpu_s", "solve": "solve_cpu_s"}
    decided = decide(problem, clock=lambda phase, work: timed(columns[phase], work))
    plan = timed("lower_cpu_s", lambda: emit_plan(program, mesh, options, decided))
    timed("lower_cpu_s", lambda: lower(program, plan, (0,) * len(sizes)))
    row["total_cpu_s"] = round(cpu_seconds() - begin, 3)
    row["variables"], row["constraints"] = decided.num_variables, decided.num_rows
    row["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    row["status"], row["gap"], row["objective_s"] = plan.solver.status, plan.solver.gap, plan.solver.objective_s
    return row


def default_layers(case: str) -> int:
    """Return the depth of the real model."""
    return 32 if case == "llama3-8b" else 12


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text, a case a column block of ``name value`` pairs."""
    lines = []
    for row in rows:
        lines.append(f"{row['case']} on ({row['mesh']}), {row['layers']} layers")
        lines += [f"  {column:<18} {row[column]}" for column in COLUMNS]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Measure the cases asked for; print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=sorted(CASES))
    parser.add_argument("--mesh", help="sizes of the axes, such as 32,8")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--memory", type=int, help="budget in bytes a rank, 0 for none; the device's own by default")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    given = parser.parse_args(arguments)
    rows = []
    for case in [given.case] if given.case else sorted(CASES):
        for mesh in [given.mesh] if given.mesh else CASES[case]:
            sizes = tuple(int(part) for part in mesh.split(","))
            rows.append(measure(case, sizes, given.layers, given.memory))
            print(table(rows[-1:]), flush=True)
    if given.json:
        given.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
