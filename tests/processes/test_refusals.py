"""Bad input is refused with an error that says what to do, on every rank; nothing hangs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.processes import refused
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
    "mesh of one kind": ("MeshError", "is no cluster"),
    "mesh on one": ("MeshError", "make the mesh smaller"),
    "meshes differ": ("InputError", "axis axis1 of 1"),
    "names differ": ("InputError", "axis b of 2"),
    "memory": ("OptionError", "memory=nan"),
    "memory on one": ("OptionError", "memory=-1"),
    "options differ": ("InputError", "option optimizer"),
    "models differ": ("InputError", "the same model"),
    "examples differ": ("InputError", "rank 1 has args[0] torch.float32[4, 16]"),
    "example on one": ("InputError", "rank 1 has no example inputs"),
    "keywords on one": ("InputError", "rank 0 has inputs ((*,), {}); rank 1 has inputs ((), {'input': *})"),
    "twice": ("OptionError", "only once"),
    "no model on one": ("OptionError", "torch.nn.Module"),
    "meta": ("OptionError", "to_empty"),
    "capture on one": ("CaptureError", "refused.py"),
    "constraint": ("ConstraintError", "nothing.like.it"),
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
    "memory": ("PlanError", "bytes a rank"),
    "constraints": ("PlanError", "leave constraints= out"),
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
    for found in pool(4).run(refused.wrong_calls, (2, 2)):
        assert_refused(found, CALLS)


def test_setups(pool: Pools) -> None:
    """Meshes, options and models that do not fit, on all ranks or on one, are refused on all."""
    for found in pool(2).run(refused.wrong_setups, (2,)):
        assert_refused(found, SETUPS)


def test_plans(pool: Pools) -> None:
    """A right plan is taken as it is; a damaged one, or one for something else, is refused on every rank."""
    for found, same in pool(2).run(refused.plans, (2,)):
        assert_refused(found, PLANS)
        assert same


def test_part_of_the_world(pool: Pools) -> None:
    """A mesh over some ranks runs on these; the others are told that they are not in it."""
    results = pool(4).run(refused.part_of_the_world)
    for rank in (1, 3):
        assert results[rank][0] < 1e-4
    for rank in (0, 2):
        assert results[rank][0] == "MeshError" and f"rank {rank} is not in the mesh" in results[rank][1]


def test_descending_mesh(pool: Pools) -> None:
    """Ranks in another order than that of process groups are refused, because pieces would be mixed up."""
    for found in pool(2).run(refused.descending_mesh):
        assert found[0] == "MeshError" and "ascending" in found[1]


def test_first_rank_alone(pool: Pools) -> None:
    """A state dict needs no other rank; the full one says which ranks it waits for."""
    count, found = pool(2).run(refused.first_rank_alone, (2,))[0]
    assert count > 0
    assert found[0] == "InputError" and "1" in found[1]
    pool(2).stop()  # the control group has an unfinished barrier


def test_copying(pool: Pools) -> None:
    """A copy would share processes: it is refused, with what to save instead."""
    for found in pool(2).run(refused.copying, (2,)):
        assert all(kind == "InputError" and "full_state_dict()" in words for kind, words in found)
