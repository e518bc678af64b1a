"""Bytes of optimizer states: as torch allocates them, and what holds for any entry."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import OptionError
from autopar.passes.cost.memory import KNOWN, OptimizerBytes, known_optimizers, optimizer_bytes, parameter_bytes

TORCH: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p),
    "momentum": lambda p: torch.optim.SGD(p, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p),
    "adamw": lambda p: torch.optim.AdamW(p),
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}

SHAPES = st.lists(st.integers(1, 9), max_size=3).map(tuple)
ENTRIES = st.builds(
    OptimizerBytes,
    name=st.sampled_from(["a", "mine.v2", "x-8"]),
    moments=st.integers(0, 3),
    itemsize=st.sampled_from([0, 1, 2, 4]),
    factored=st.integers(0, 1),
    block=st.sampled_from([0, 3, 256]),
    block_least=st.sampled_from([0, 100]),
    scalars=st.sampled_from([0, 4, 8]),
    master=st.integers(0, 1),
)


@pytest.mark.parametrize("name", sorted(TORCH))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (5, 6), (2, 3, 4)])
def test_state_is_what_torch_allocates(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """After a step, the state of torch's own optimizer takes the bytes that the model says."""
    parameter = torch.ones(shape, dtype=dtype, requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    optimizer = TORCH[name]([parameter])
    optimizer.step()
    kept = sum(t.nbytes for t in optimizer.state[parameter].values() if isinstance(t, torch.Tensor))
    assert parameter_bytes(parameter.numel(), dtype.itemsize, True, name, shape).optimizer == kept


def test_mixed_precision_adam_is_sixteen_bytes() -> None:
    """16-bit parameters and gradients, float32 master and two moments: 16 bytes an element (ZeRO, section 3.1)."""
    found = parameter_bytes(1000, 2, True, "adamw-mixed")
    assert (found.parameter, found.gradient, found.optimizer - KNOWN["adamw"].scalars) == (2000, 2000, 12000)


def test_no_master_of_what_is_float32() -> None:
    """A float32 parameter is its own master."""
    assert parameter_bytes(10, 4, True, "adam-mixed") == parameter_bytes(10, 4, True, "adam")


def test_eight_bits() -> None:
    """A byte a value and a scale a block; small parameters stay in float32."""
    assert parameter_bytes(8192, 2, True, "adam8bit").optimizer == 2 * (8192 + 32 * 4)
    assert parameter_bytes(100, 2, True, "adam8bit").optimizer == 2 * 400


def test_a_factored_state_needs_the_shape() -> None:
    """Rows and columns of the last two dims; without a shape it is counted as a full one, never as less."""
    assert parameter_bytes(60, 4, True, "adafactor", (3, 4, 5)).optimizer == 3 * (4 + 5) * 4 + 4
    assert parameter_bytes(60, 4, True, "adafactor").optimizer == 60 * 4 + 4


@given(entry=ENTRIES, numel=st.integers(0, 1000), itemsize=st.sampled_from([2, 4, 8]))
def test_more_elements_never_take_less(entry: OptimizerBytes, numel: int, itemsize: int) -> None:
    """Apart from the step from small to blocked parameters, bytes grow with the elements."""
    if not entry.block or numel + 1 != entry.block_least:
        assert entry.state_bytes(numel, itemsize) <= entry.state_bytes(numel + 1, itemsize)


@given(entry=ENTRIES, shape=SHAPES, itemsize=st.sampled_from([2, 4, 8]))
def test_text_is_read_back(entry: OptimizerBytes, shape: tuple[int, ...], itemsize: int) -> None:
    """The text of an entry means the entry, by numbers as well; a frozen parameter has no state."""
    numel = torch.Size(shape).numel()
    assert optimizer_bytes(str(entry)) == entry
    assert parameter_bytes(numel, itemsize, True, str(entry), shape).optimizer == entry.state_bytes(
        numel, itemsize, shape
    )
    assert parameter_bytes(numel, itemsize, False, str(entry), shape).total == numel * itemsize


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_known_names_are_their_own_text(name: str) -> None:
    """A known optimizer is written as its name."""
    assert str(optimizer_bytes(name)) == name


def test_unknown_optimizer_is_refused_with_the_known_ones() -> None:
    """The message lists what is known and says how to add one."""
    with pytest.raises(OptionError, match=r"'adafactor', .*'sgd'.*OptimizerBytes\('mine', moments=2\)"):
        optimizer_bytes("shampoo")
    assert "mixed" not in known_optimizers()


@pytest.mark.parametrize(
    ("text", "words"), [("mine{turns=3}", "'turns=3'.*moments"), ("mine{moments=x}", "'moments=x'"), ("{}", "unknown")]
)
def test_bad_text_is_refused(text: str, words: str) -> None:
    """A fact that does not exist or is no count is named."""
    with pytest.raises(OptionError, match=words):
        optimizer_bytes(text)


@pytest.mark.parametrize(
    ("facts", "words"), [({"moments": -1}, "no count"), ({"scalars": 1.5}, "no count"), ({"master": 2}, "one master")]
)
def test_impossible_entries_are_refused(facts: dict[str, int], words: str) -> None:
    """An entry with an impossible figure says which."""
    with pytest.raises(OptionError, match=words):
        OptimizerBytes("mine", **facts)
    with pytest.raises(OptionError, match="no name"):
        OptimizerBytes("a b")
