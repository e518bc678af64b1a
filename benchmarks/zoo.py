"""The zoo: unmodified architectures at small sizes, each planned on meshes and compared with one device.

``python benchmarks/zoo.py [--case NAME] [--mesh 2,2] [--json OUT]``. A row is ``case, mesh, result, replicated_ops,
predicted_speedup, seconds``. ``result``: ``match`` (loss, outputs, all gradients, buffers and a step of the optimizer
equal one device), ``refused`` (a clear error before anything runs), ``wrong``, ``error``, ``hang``, or ``skipped``
where the package of the model is not installed. ``replicated_ops`` counts the ops that no axis splits,
``predicted_speedup`` is that of a training step (or a forward) on a device which is so slow, beside its links, that
small models are worth splitting (``zoo_models/small_device.json``).

Every case runs in a process of its own under a time limit, so that a crash or a hang is a row like any other.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import json
import multiprocessing
import random
import re
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.errors import AutoparError, LoweringError, MismatchError, RuleError
from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.pipeline import make_plan
from autopar.passes.program import Program, result_values
from autopar.plans import Options, Plan
from autopar.runtime.signature import take_apart
from autopar.runtime.verify_ranks import verify_ranks

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.zoo_models import load  # noqa: E402
from benchmarks.zoo_models.case import Case, vision_package  # noqa: E402

MESHES = ((4,), (2, 2), (8,))
LIMIT_S = 300
"""CPU seconds that a mesh of a case may take: a busy machine makes nothing hang."""
WAIT = 6
"""How many times as long, on the wall, until a process that does nothing is ended too."""
PROFILE = str(Path(__file__).resolve().parent / "zoo_models" / "small_device.json")
FAULTS_OF_OURS = (LoweringError, RuleError)
"""Errors of autopar that are no refusals: the compiler contradicts itself."""

Row = dict[str, Any]
Planner = Callable[[Program, Mesh], Plan]


def zoo_mesh(sizes: Sequence[int]) -> Mesh:
    """Return a mesh of the zoo's device."""
    return Mesh(tuple(sizes), device=PROFILE, links=(f"{PROFILE}:fast",) * len(sizes))


def plan_best(program: Program, mesh: Mesh) -> Plan:
    """Return autopar's own plan."""
    return make_plan(program, mesh, Options())


def plan_random(seed: int) -> Planner:
    """Return a planner of random legal plans."""
    seeded_plan = importlib.import_module("tests.strategies.plans").seeded_plan
    return lambda program, mesh: seeded_plan(program, mesh, seed)


def replicated(program: Program, plan: Plan) -> Counter[str]:
    """Return how often each op runs whole on every rank; ops on single numbers are left out."""
    counts: Counter[str] = Counter()
    for node in program.ops():
        sizes = [value.numel() for _, value in result_values(node)]
        if max(sizes, default=0) > 1 and set(plan.choices.get(node.name, ("",))) == {"replicate"}:
            counts[str(node.target)] += 1
    return counts


class Prepared:
    """A case that is built and captured once for all its meshes."""

    def __init__(self, case: Case, double: bool = False) -> None:
        torch.manual_seed(0)
        self.model, args, kwargs = case.build()
        if double:
            self.model.double()
            args, kwargs = pytree.tree_map_only(torch.Tensor, _doubled, (args, kwargs))
        self.model.train(case.training)
        self.training = case.training
        with torch.set_grad_enabled(case.training):
            call = take_apart(self.model, args, kwargs, device=None)
            self.args, self.kwargs = call.args, call.kwargs
            self.program = annotate(capture(self.model, self.args, self.kwargs))
        self.alone = make_plan(self.program, zoo_mesh((1,)), Options()).step_seconds

    def run(self, sizes: Sequence[int], planner: Planner) -> Row:
        """Plan and verify on one mesh; return the figures of the row."""
        plan = planner(self.program, zoo_mesh(sizes))
        whole = replicated(self.program, plan)
        verify_ranks(self.model, self.program, plan, self.args, self.kwargs)
        return {
            "result": "match",
            "ops": sum(1 for _ in self.program.ops()),
            "replicated_ops": whole.total(),
            "predicted_speedup": round(self.alone / plan.step_seconds, 2) if plan.step_seconds else None,
            "replicated": dict(whole.most_common(8)),
        }


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.dtype is torch.float32 else tensor


def judge(error: BaseException) -> Row:
    """Return the result that an exception stands for."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, (ImportError, ModuleNotFoundError)) and "autopar" not in str(getattr(error, "name", "")):
        return {"result": "skipped", "detail": text}
    if isinstance(error, MismatchError):
        return {"result": "wrong", "detail": text}
    if isinstance(error, AutoparError) and not isinstance(error, FAULTS_OF_OURS):
        return {"result": "refused", "detail": text}
    where = traceback.extract_tb(error.__traceback__)[-1:]
    return {"result": "error", "detail": f"{text} ({where[0].filename}:{where[0].lineno})" if where else text}


def _allow(seconds: float) -> None:
    """Let this process use so many more CPU seconds; it is killed after them."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(usage.ru_utime + usage.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _child(case: Case, meshes: Sequence[Sequence[int]], seed: int | None, limit_s: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    _allow(limit_s)
    planner = plan_best if seed is None else plan_random(seed)
    started = time.perf_counter()
    try:
        prepared = Prepared(case)
    except Exception as error:
        pipe.send({**judge(error), "all": True, "seconds": time.perf_counter() - started})
        return
    for sizes in meshes:
        _allow(limit_s)
        try:
            row = prepared.run(sizes, planner)
        except MismatchError as error:
            row = _in_double(case, sizes, planner, error)
        except Exception as error:
            row = judge(error)
        pipe.send({**row, "seconds": round(time.perf_counter() - started, 1)})
        started = time.perf_counter()


def _in_double(case: Case, sizes: Sequence[int], planner: Planner, error: MismatchError) -> Row:
    """Return the row of a case that differs in float32: run again in float64, where rounding can't be the reason.

    A norm over a few numbers that hardly differ lifts the rounding of any order of summation above every tolerance. In
    float64 the tolerance is a hundred thousand times tighter, and what is wrong stays wrong.
    """
    try:
        row = Prepared(case, double=True).run(sizes, planner)
    except Exception:
        return judge(error)
    return {**row, "detail": f"in float64, since rounding is lifted above the tolerance of float32 ({error})"}


def run_case(
    case: Case, meshes: Sequence[Sequence[int]], seed: int | None = None, limit_s: float = LIMIT_S
) -> list[Row]:
    """Run a case on meshes in a process of its own; return a row a mesh.

    A mesh on which the process dies or does not end in time is an ``error`` or a ``hang``; the others go on in a new
    process.
    """
    rows: list[Row] = []
    context = multiprocessing.get_context("fork")
    while len(rows) < len(meshes):
        ours, theirs = context.Pipe()
        process = context.Process(target=_child, args=(case, meshes[len(rows) :], seed, limit_s, theirs), daemon=False)
        process.start()
        theirs.close()
        while len(rows) < len(meshes):
            found = _receive(ours, process, limit_s)
            rows.append(found)
            if found.pop("all", False):
                rows += [dict(found) for _ in meshes[len(rows) :]]
            if found.pop("ended", False):
                break
        ours.close()
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
    head = ("case", "kind", "package", "training", "plan", "mesh")
    plan = "best" if seed is None else f"random {seed}"
    facts = (case.name, case.kind, case.package, case.training, plan)
    return [{**dict(zip(head, (*facts, list(sizes)))), **row} for sizes, row in zip(meshes, rows)]


def _receive(pipe: Connection, process: Any, limit_s: float) -> Row:
    started = time.perf_counter()
    if not pipe.poll(WAIT * limit_s):
        process.kill()
        return {"result": "hang", "detail": f"not done after {limit_s:.0f} s", "seconds": limit_s, "ended": True}
    try:
        found: Row = pipe.recv()
        return found
    except EOFError:
        process.join()
        seconds = round(time.perf_counter() - started, 1)
        if process.exitcode == -signal.SIGXCPU:
            detail = f"not done after {limit_s:.0f} CPU seconds"
            return {"result": "hang", "detail": detail, "seconds": seconds, "ended": True}
        return {"result": "error", "detail": f"its process ended with {process.exitcode}", "seconds": seconds,
                "ended": True}  # fmt: skip


def line(row: Row) -> str:
    """Return a row as a line of text."""
    mesh = "x".join(map(str, row["mesh"]))
    whole, speed = row.get("replicated_ops", ""), row.get("predicted_speedup", "")
    head = f"{row['case']:<28}{mesh:>5} {row['result']:<8}{whole!s:>6}{speed!s:>7}{row['seconds']:7.1f}s"
    return f"{head}  {row.get('detail', '')}".rstrip()


def page(rows: Sequence[Row]) -> str:
    """Return ``docs/zoo.md``: a line a case, a cell a mesh; the last row of a case on a mesh counts."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        column = _name(row["mesh"]) if row.get("plan", "best") == "best" else RANDOM
        found.setdefault((row["kind"], row["case"]), {})[column] = row
    columns = [*map(_name, MESHES), RANDOM]
    lines = [*HEAD, f"{len(found)} architectures.", ""]
    everywhere = [by for by in found.values() if all(column in by for column in columns[:-1])]
    equal = sum(all(by[column]["result"] == "match" for column in columns[:-1]) for by in everywhere)
    lines.append(f"{len(everywhere)} of them ran on every mesh by autopar's plan; {equal} match on all.")
    for title, some in (("By autopar's plan", columns[:-1]), ("By random plans", columns[-1:])):
        counts = Counter(by[column]["result"] for by in found.values() for column in some if column in by)
        told = ", ".join(f"{count} {result}" for result, count in counts.most_common())
        lines.append(f"{title}: {counts.total()} runs: {told}.")
    lines += ["", f"| kind | case | package | mode | {' | '.join(columns)} |", f"|{' --- |' * (4 + len(columns))}"]
    for (kind, name), by in sorted(found.items()):
        some_row = next(iter(by.values()))
        mode = "training" if some_row["training"] else "inference"
        cells = " | ".join(_cell(by.get(column)) for column in columns)
        lines.append(f"| {kind} | {name} | {some_row['package'] or 'written here'} | {mode} | {cells} |")
    lines += ["", "## What is not equal, and why", ""]
    for (_, name), by in sorted(found.items()):
        details = sorted({PLACE.sub("", row["detail"])[:400] for row in by.values() if row.get("detail")})
        lines += [f"- **{name}**: {detail}" for detail in details[:1]]
    return "\n".join(lines)


RANDOM = "a random plan"
HEAD = (
    "# The zoo",
    "",
    "Generated by `benchmarks/zoo.py` from the rows kept in `benchmarks/data/zoo_rows.json` (`--json new.json`, then",
    "`--page benchmarks/data/zoo_rows.json new.json`: the last row of a case on a mesh counts): unmodified",
    "architectures of installed packages (`pip install autopar[zoo]`) and some written in `benchmarks/zoo_models`,",
    "with random weights at small sizes, planned and run by all ranks in one process. `match`: loss, outputs, every",
    "gradient, buffers and a step of the optimizer equal one device. A cell is the result, the ops that run whole on",
    "every rank (those on single numbers left out) and the predicted speed-up over one device, on a device so slow",
    "beside its links that small models are worth splitting. A random plan is a legal one that splits what the best",
    "one of a small model leaves whole. What is `refused` gets an error that names the line of the model; a `hang`",
    "is a plan that was not found within the CPU seconds of the run. A cell is empty where the mesh was left out.",
    "",
)
PLACE = re.compile(r"/\S*/(?=(?:torch|torchvision|transformers|timm|diffusers)/)")
"""Where packages are installed, in the text of an error."""


def _name(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row["result"] != "match" or row.get("plan", "best") != "best":
        return str(row["result"])
    return f"match, {row['replicated_ops']} whole, {row['predicted_speedup']}x"


def main(arguments: list[str] | None = None) -> int:
    """Run the cases asked for; print a line each and a summary, write the rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", help="run this case alone; may be given again")
    parser.add_argument("--kind", help="run the cases of this kind alone")
    parser.add_argument("--mesh", help="run on this mesh alone, such as 2,2")
    parser.add_argument("--random", type=int, metavar="SEED", help="run a random legal plan instead of the best")
    parser.add_argument("--sample", type=int, help="run so many cases, which change with the date")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="CPU seconds that a mesh of a case may take")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--page", nargs="+", type=Path, metavar="JSON", help="print docs/zoo.md from rows, run nothing")
    options = parser.parse_args(arguments)
    if options.page:
        print(page([row for file in options.page for row in json.loads(file.read_text())["rows"]]))
        return 0
    cases = load()
    unknown = sorted(set(options.case or ()) - set(cases))
    if unknown:
        parser.error(f"no case is called {', '.join(unknown)}; --list prints all")
    chosen = [c for c in cases.values() if not options.case or c.name in options.case]
    chosen = [c for c in chosen if not options.kind or c.kind == options.kind]
    if options.sample:
        chosen = random.Random(datetime.date.today().toordinal()).sample(chosen, min(options.sample, len(chosen)))
    if options.list:
        print("\n".join(f"{c.name:<28}{c.kind:<22}{c.package}" for c in chosen))
        return 0
    meshes = [tuple(int(n) for n in options.mesh.split(","))] if options.mesh else list(MESHES)
    _import_packages(chosen)
    rows: list[Row] = []
    for case in chosen:
        for row in run_case(case, meshes, options.random, options.limit):
            rows.append(row)
            print(line(row), flush=True)
    counts = Counter(row["result"] for row in rows)
    print(f"{len(rows)} runs: " + ", ".join(f"{count} {result}" for result, count in sorted(counts.items())))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))
    return 0 if set(counts) <= {"match", "refused", "skipped"} else 1


def _import_packages(cases: Sequence[Case]) -> None:
    """Import what many cases need once, before their processes are forked off."""
    if {case.package for case in cases} - {""} and importlib.util.find_spec("torchvision") is not None:
        vision_package()
    if any(case.package == "transformers" for case in cases) and importlib.util.find_spec("transformers") is not None:
        importlib.import_module("transformers.modeling_utils")


if __name__ == "__main__":
    raise SystemExit(main())
