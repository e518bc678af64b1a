"""Bad input is refused with an error that says what to do, on every rank; nothing hangs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.processes import semantics
from tests.processes.pool import Pool

pytestmark = pytest.mark.processes
Pools = Callable[[int], Pool]

CALLS = {
    "shapes": ("InputError", "every rank must make the same call"),
    "contents": ("InputError", "use inputs='local'"),
    "type": ("InputError", "neither a tensor nor a plain constant"),
    "device": ("InputError", "is on meta, but the mesh runs on cpu"),
    "mode": ("InputError", "training"),
    "after": ("nothing", ""),
    "assign": ("OptionError", "assign=True"),
    "part": ("OptionError", "call the whole module"),
}

SETUPS = {
    "mesh too large": ("MeshError", "make the mesh smaller"),
    "mesh too small": ("MeshError", "pass a DeviceMesh"),
    "memory": ("OptionError", "memory=nan"),
    "memory on one": ("OptionError", "memory=-1"),
    "options differ": ("InputError", "option optimizer"),
    "models differ": ("InputError", "the same model"),
    "no model on one": ("OptionError", "torch.nn.Module"),
    "meta": ("OptionError", "to_empty"),
    "capture on one": ("CaptureError", "semantics.py"),
    "after": ("nothing", ""),
}

PLANS = {
    "cut": ("PlanError", "cut.json"),
    "newer": ("PlanError", "schema 99"),
    "missing": ("PlanError", "missing.json"),
    "other mesh": ("PlanError", "make a plan for this mesh"),
    "other inputs": ("PlanError", "another program"),
    "other model": ("PlanError", "another model"),
    "other meaning": ("PlanError", "inputs='local'"),
    "kind": ("OptionError", "plan= takes"),
    "first call": ("PlanError", "another program"),
    "lazily": ("nothing", ""),
}


def assert_refused(found: dict[str, tuple[str, str]], expected: dict[str, tuple[str, str]]) -> None:
    """Check class and words of every refusal."""
    assert list(found) == list(expected)
    wrong = {
        name: found[name]
        for name, (kind, words) in expected.items()
        if found[name][0] != kind or words not in found[name][1]
    }
    assert wrong == {}


def test_calls(pool: Pools) -> None:
    """Calls that differ between the ranks, or are wrong on one, are refused on all, and the next call works."""
    for found in pool(4).run(semantics.wrong_calls, (2, 2)):
        assert_refused(found, CALLS)


def test_setups(pool: Pools) -> None:
    """Meshes, options and models that do not fit, on all ranks or on one, are refused on all."""
    for found in pool(2).run(semantics.wrong_setups, (2,)):
        assert_refused(found, SETUPS)


def test_plans(pool: Pools) -> None:
    """A right plan is taken as it is; a damaged one, or one for something else, is refused on every rank."""
    for found, same in pool(2).run(semantics.plans, (2,)):
        assert_refused(found, PLANS)
        assert same
