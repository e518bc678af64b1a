"""The fault cases, a sample that changes with the date: by the best plan, and by a random legal one."""

from __future__ import annotations

import datetime
import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


def _benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fault_cases_benchmark", ROOT / "benchmarks" / "fault_cases.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


BENCHMARK = _benchmark()
CASES = BENCHMARK.load_cases(BENCHMARK.DEFAULT)
TODAY = datetime.date.today().toordinal()
ALLOWED = {"match", "refused_allowed"}
SAMPLE = random.Random(TODAY).sample(sorted(CASES.REG), 5)


@pytest.mark.parametrize("name", SAMPLE)
def test_best_plan_equals_one_device(name: str) -> None:
    """Every mesh of the case, by autopar's own plan."""
    for sizes in CASES.REG[name]["fn"]()["mesh"]:
        result, detail = BENCHMARK.guarded(CASES, name, tuple(sizes), BENCHMARK.plan_best)
        assert result in ALLOWED, f"case {name} on {sizes}: {result}: {detail}"


@pytest.mark.parametrize("name", SAMPLE)
def test_random_plan_equals_one_device(name: str) -> None:
    """A random legal plan splits what the best plan of a tiny model leaves whole."""
    for sizes in ((4,), (2, 3)):
        result, detail = BENCHMARK.guarded(CASES, name, sizes, BENCHMARK.plan_random(TODAY))
        assert result in ALLOWED, f"case {name} on {sizes}, random plan {TODAY}: {result}: {detail}"


def test_constants_of_the_model_meet_split_tensors() -> None:
    """Indices burnt into a program as constants are read by ops whose local values are worked out on meta."""
    assert BENCHMARK.run_case(CASES, "38", (2, 3), BENCHMARK.plan_random(3)) == ("match", "")
