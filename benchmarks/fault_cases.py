"""Run fault cases: small models after faults that users reported, each on every mesh that it names, in one process.

``python benchmarks/fault_cases.py [FILE] [--case 01] [--mesh 2,2] [--json OUT]``. FILE is any module of the form of
``tests/cases/fault_cases.py`` (the default): a registry ``REG`` of cases, ``reference`` and ``compare``. Each case is
run as it is on one device, and again with its model run by all ranks of the plan that autopar makes. A row is ``case,
mesh, result``: ``match``, ``refused_allowed``, ``refused``, ``wrong``, ``error`` or ``hang``. On tiny models the best
plan splits little, so ``--random SEED`` runs every case by a random legal plan instead.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch

from autopar.errors import AutoparError, LoweringError, MismatchError, RuleError
from autopar.mesh import Mesh
from autopar.passes.pipeline import make_plan
from autopar.passes.program import Program
from autopar.plans import Options, Plan
from autopar.runtime.simulated_module import Planner, SimulatedModule

DEFAULT = Path(__file__).resolve().parent.parent / "tests" / "cases" / "fault_cases.py"
LIMIT_S = 120
"""CPU seconds that a case may take; ten times as long on the clock, for one that waits for ever."""
FAULTS_OF_OURS = (LoweringError, MismatchError, RuleError)
"""Errors of autopar that are no refusals: the compiler contradicts itself."""


class Hang(BaseException):
    """A case that did not end in time."""


def load_cases(path: Path) -> ModuleType:
    """Import the file of cases as a module."""
    spec = importlib.util.spec_from_file_location("fault_cases_file", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def plan_best(program: Program, mesh: Mesh) -> Plan:
    """Return autopar's own plan."""
    return make_plan(program, mesh, Options())


def plan_random(seed: int) -> Planner:
    """Return a planner of random legal plans."""
    root = str(Path(__file__).resolve().parent.parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    seeded_plan = importlib.import_module("tests.strategies.plans").seeded_plan
    return lambda program, mesh: seeded_plan(program, mesh, seed)


def run_case(cases: ModuleType, name: str, sizes: tuple[int, ...], planner: Planner = plan_best) -> tuple[str, str]:
    """Return ``(result, detail)`` of one case on a mesh."""
    make = cases.REG[name]["fn"]
    torch.manual_seed(0)
    case = make()
    truth = cases.reference(case)
    torch.manual_seed(0)
    case = make()
    case["model"] = SimulatedModule(case["model"], Mesh(sizes), planner)
    try:
        found = cases.reference(case)
    except AutoparError as error:
        detail = f"{type(error).__name__}: {error}"
        if isinstance(error, FAULTS_OF_OURS):
            return "error", detail
        return ("refused_allowed" if case.get("expect") == "match_or_refuse" else "refused"), detail
    if case.get("expect") == "property":
        try:
            case["check"](found)
        except AssertionError as error:
            return "wrong", f"the property fails: {error}"
        return "match", ""
    faults = cases.compare(truth, found, case.get("tol", 2e-4), case.get("none_ok", ()), case.get("loss_tol"))
    return ("wrong", "; ".join(faults[:3])) if faults else ("match", "")


def guarded(cases: ModuleType, name: str, sizes: tuple[int, ...], planner: Planner) -> tuple[str, str]:
    """Run one case; anything it throws becomes a result."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Hang

    clocks = ((signal.ITIMER_PROF, signal.SIGPROF, LIMIT_S), (signal.ITIMER_REAL, signal.SIGALRM, 10 * LIMIT_S))
    for clock, number, limit_s in clocks:
        signal.signal(number, stop)
        signal.setitimer(clock, limit_s)
    try:
        return run_case(cases, name, sizes, planner)
    except Hang:
        return "hang", f"not done after {LIMIT_S} CPU seconds"
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"
    finally:
        for clock, _, _ in clocks:
            signal.setitimer(clock, 0)


def main() -> int:
    """Run the cases asked for, print a line each and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=DEFAULT)
    parser.add_argument("--case", help="run this case alone")
    parser.add_argument("--mesh", help="run on this mesh alone, such as 2,2")
    parser.add_argument("--random", type=int, metavar="SEED", help="run a random legal plan instead of the best")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = load_cases(options.file)
    planner = plan_best if options.random is None else plan_random(options.random)
    rows: list[dict[str, Any]] = []
    for name in sorted(cases.REG) if options.case is None else [options.case]:
        meshes = cases.REG[name]["fn"]()["mesh"]
        if options.mesh:
            meshes = (tuple(int(n) for n in options.mesh.split(",")),)
        for sizes in meshes:
            started = time.perf_counter()
            result, detail = guarded(cases, name, tuple(sizes), planner)
            seconds = time.perf_counter() - started
            rows.append({"case": name, "mesh": list(sizes), "result": result, "detail": detail, "seconds": seconds})
            mesh = "x".join(map(str, sizes))
            print(f"{name:>4} {mesh:>6} {result:<16}{seconds:6.1f}s  {detail[:160]}", flush=True)
    counts = Counter(row["result"] for row in rows)
    print(f"{len(rows)} runs: " + ", ".join(f"{count} {result}" for result, count in sorted(counts.items())))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))
    return 0 if set(counts) <= {"match", "refused_allowed"} else 1


if __name__ == "__main__":
    raise SystemExit(main())
