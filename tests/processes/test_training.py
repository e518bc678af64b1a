"""Real gloo processes train what one process trains: losses, gradients, parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.models import MODELS
from tests.processes import bodies
from tests.processes.pool import Pool
from tests.rotate import todays

pytestmark = pytest.mark.processes
Pools = Callable[[int], Pool]

TOLERANCE = 1e-4

CASES = [
    ("mlp", (2,), 0.1, "best"),
    ("mlp", (2,), 0.0, "tight"),
    ("gpt2", (2,), 0.1, "random"),
    ("vit", (2,), 0.1, "best"),
    ("resnet", (2,), 0.1, "random"),
    ("mlp", (2, 2), 0.1, "tight"),
    ("mlp", (4,), 0.1, "random"),
    ("gpt2", (4,), 0.1, "best"),
    ("llama", (2, 2), 0.1, "random"),
    ("bert", (4,), 0.1, "random"),
    ("vit", (2, 2), 0.0, "random"),
    ("resnet", (2, 2), 0.0, "best"),
    ("t5", (2,), 0.1, "random"),
    ("gpt2", (2, 2), 0.0, "best"),
    ("llama", (2,), 0.0, "best"),
    ("llama", (4,), 0.0, "best"),
    ("bert", (2,), 0.1, "best"),
    ("bert", (2, 2), 0.0, "best"),
    ("vit", (4,), 0.0, "best"),
    ("resnet", (4,), 0.0, "best"),
    ("t5", (4,), 0.0, "best"),
    ("t5", (2, 2), 0.0, "best"),
]


@pytest.mark.parametrize(("name", "sizes", "dropout", "how"), todays(CASES, lambda case: case[1], more=2))
def test_training(pool: Pools, name: str, sizes: tuple[int, ...], dropout: float, how: str) -> None:
    """Three steps under a plan of any kind are those of one process."""
    size = 1
    for n in sizes:
        size *= n
    results = pool(size).run(bodies.train, name, sizes, dropout, how)
    first = results[0]
    assert all(result.losses == first.losses for result in results), "the ranks see different losses"
    assert first.losses == pytest.approx(first.expected, rel=TOLERANCE)
    assert {what: error for what, error in first.errors.items() if not error[0] < TOLERANCE} == {}
    if how != "best":
        assert first.split_parameters > 0
        assert first.collectives > 0


def test_every_model_has_every_mesh() -> None:
    """All seven models train on two processes and on four, in a row and in a square."""
    assert {case[:2] for case in CASES} == {(name, sizes) for name in MODELS for sizes in ((2,), (4,), (2, 2))}


def test_replicas_stay_equal(pool: Pools) -> None:
    """After AdamW steps with dropout every rank holds the same bits, with foreach over all parameters at once."""
    sums = pool(4).run(bodies.replicas_agree, "gpt2", (2, 2), "random")
    assert all(each == sums[0] for each in sums)


@pytest.mark.parametrize(
    ("name", "sizes", "how"), [("gpt2", (2,), "best"), ("gpt2", (2, 2), "random"), ("resnet", (4,), "random")]
)
def test_state_round_trip(pool: Pools, name: str, sizes: tuple[int, ...], how: str) -> None:
    """State dicts keep keys, order and ties, load strictly into the original and back, and through DCP."""
    for facts in pool(2 if sizes == (2,) else 4).run(bodies.round_trip, name, sizes, how):
        assert facts["keys"] and facts["tied"] and facts["plain"] and facts["all DTensors"]
        assert "All keys matched" in facts["strict"]
        assert facts["loaded"][0] == 0.0
        assert facts["dcp"][0] == 0.0


@pytest.mark.parametrize(
    ("name", "sizes", "how"), [("mlp", (2,), "random"), ("resnet", (2,), "best"), ("llama", (4,), "best")]
)
def test_modes_and_shapes(pool: Pools, name: str, sizes: tuple[int, ...], how: str) -> None:
    """A smaller batch, then eval without gradients, then the first shape again, whose program is still there."""
    errors, programs = pool(2 if sizes == (2,) else 4).run(bodies.modes_and_shapes, name, sizes, how)[0]
    assert {what: error for what, error in errors.items() if not error[0] < TOLERANCE} == {}
    assert programs == 3
