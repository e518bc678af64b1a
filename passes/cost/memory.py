"""Bytes that a rank keeps for a parameter: itself, its gradient, and the state of its optimizer, by optimizer."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache

from autopar.errors import OptionError

FLOAT32 = 4
MIXED = "-mixed"
"""Behind the name of an optimizer: parameters and gradients in 16 bits, a float32 master copy and float32 state."""

_TEXT = re.compile(r"([A-Za-z][\w.+-]*)(?:\{([^{}]*)\})?")


@dataclass(frozen=True)
class OptimizerBytes:
    """What an optimizer keeps for one parameter: an entry of ``KNOWN``, or one of your own for ``optimizer=``.

    Attributes:
        name: what reports call it.
        moments: values kept for each element.
        itemsize: bytes of a kept value; 0: as many as an element of the parameter has.
        factored: pairs of row and column sums kept for a parameter of two dims or more, over its last two; one value
            for each element of any other.
        block: elements that share a float32 scale, for each moment; 0: none do.
        block_least: a parameter with fewer elements keeps its moments in float32, without scales.
        scalars: bytes of counters for each parameter, whatever its size.
        master: 1: parameters of less than 32 bits have a float32 copy, and all state is at least float32.

    >>> print(OptimizerBytes("mine", moments=3, itemsize=4))
    mine{moments=3,itemsize=4}
    """

    name: str
    moments: int = 0
    itemsize: int = 0
    factored: int = 0
    block: int = 0
    block_least: int = 0
    scalars: int = 0
    master: int = 0

    def __post_init__(self) -> None:
        counts = {key: value for key, value in asdict(self).items() if key != "name"}
        for key, value in counts.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise OptionError(f"{key}={value!r} of the optimizer {self.name!r} is no count; give 0 or more")
        if not _TEXT.fullmatch(self.name) or "{" in self.name:
            raise OptionError(f"{self.name!r} is no name of an optimizer; start with a letter, use no braces")
        if self.master > 1:
            raise OptionError(f"master={self.master} of the optimizer {self.name!r}: there is one master copy or none")

    def __str__(self) -> str:
        """Return the text that ``optimizer_bytes`` reads: a known name, or the name with all that is not zero."""
        if KNOWN.get(self.name) == self:
            return self.name
        facts = [f"{key}={value}" for key, value in asdict(self).items() if key != "name" and value]
        return f"{self.name}{{{','.join(facts)}}}"

    def state_bytes(self, numel: int, itemsize: int, shape: Sequence[int] | None = None) -> int:
        """Return the bytes of the state for a piece of a parameter.

        Args:
            numel: elements of the piece.
            itemsize: bytes of one of them.
            shape: of the piece; without it a factored state is counted as a full one.
        """
        kept = self.itemsize or itemsize
        kept = max(kept, FLOAT32) if self.master else kept
        full = self.moments * numel * kept
        if self.block and numel < self.block_least:
            full = self.moments * numel * FLOAT32
        elif self.block:
            full += self.moments * -(-numel // self.block) * FLOAT32
        copy = numel * FLOAT32 if self.master and itemsize < FLOAT32 else 0
        return full + self.factored * _factored(numel, shape) * kept + copy + self.scalars

    def mixed(self) -> OptimizerBytes:
        """Return the same with float32 masters."""
        return replace(self, name=self.name + MIXED, master=1)


def _factored(numel: int, shape: Sequence[int] | None) -> int:
    if shape is None or len(shape) < 2 or not numel:
        return numel
    rows, columns = shape[-2:]
    return math.prod(shape[:-2]) * (rows + columns)


_STEP = FLOAT32
"""``torch.optim`` counts the steps of every parameter in a float32 scalar of its own."""

KNOWN: dict[str, OptimizerBytes] = {
    entry.name: entry
    for entry in (
        OptimizerBytes("sgd"),
        OptimizerBytes("momentum", moments=1),
        OptimizerBytes("nesterov", moments=1),
        OptimizerBytes("adam", moments=2, scalars=_STEP),
        OptimizerBytes("adamw", moments=2, scalars=_STEP),
        OptimizerBytes("amsgrad", moments=3, scalars=_STEP),
        OptimizerBytes("adagrad", moments=1, scalars=_STEP),
        OptimizerBytes("rmsprop", moments=1, scalars=_STEP),
        OptimizerBytes("adafactor", factored=1, scalars=_STEP),
        OptimizerBytes("lion", moments=1),
        OptimizerBytes("adam8bit", moments=2, itemsize=1, block=256, block_least=4096),
    )
}
"""Optimizers by name, as torch 2.13 allocates their state: in the dtype of the parameter, which it is created like.

``adam8bit`` is block-wise 8-bit Adam (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization") as
bitsandbytes keeps it: a byte a value, a float32 scale for 256 of them, small parameters in float32. ``lion`` (Chen et
al. 2023, "Symbolic Discovery of Optimization Algorithms") keeps one momentum. Every name also stands with ``-mixed``.
"""
KNOWN |= {entry.name + MIXED: entry.mixed() for entry in KNOWN.values()}


@lru_cache(maxsize=256)
def optimizer_bytes(text: str) -> OptimizerBytes:
    """Return what the optimizer ``text`` keeps: a known name, that with ``-mixed``, or the text of an entry.

    Raises:
        OptionError: it is none of these.

    >>> optimizer_bytes("adamw-mixed").master, optimizer_bytes("mine{moments=3}").moments
    (1, 3)
    """
    if text in KNOWN:
        return KNOWN[text]
    match = _TEXT.fullmatch(text)
    if match is None or match[2] is None:
        raise OptionError(
            f"optimizer={text!r} is unknown; use one of {known_optimizers()}, one of them with {MIXED!r} behind it for "
            "float32 masters, or say what yours keeps: optimizer=autopar.OptimizerBytes('mine', moments=2)"
        )
    return OptimizerBytes(match[1], **_facts(text, match[2]))


def known_optimizers() -> str:
    """Return the names of all optimizers whose state is known, for messages."""
    return ", ".join(repr(name) for name in sorted(KNOWN) if not name.endswith(MIXED))


def _facts(text: str, inside: str) -> dict[str, int]:
    keys = [field.name for field in fields(OptimizerBytes) if field.name != "name"]
    facts: dict[str, int] = {}
    for part in filter(None, inside.split(",")):
        key, _, value = part.partition("=")
        if key.strip() not in keys or not value.strip().isdecimal():
            raise OptionError(f"{part!r} in optimizer={text!r} is no fact; write <key>=<count> of {', '.join(keys)}")
        facts[key.strip()] = int(value)
    return facts


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes that one parameter takes on one rank, by purpose."""

    parameter: int
    gradient: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameter + self.gradient + self.optimizer


def parameter_bytes(
    numel: int, itemsize: int, requires_grad: bool, optimizer: str, shape: Sequence[int] | None = None
) -> ParameterBytes:
    """Return the bytes of the local piece of a parameter; a frozen one has neither gradient nor state.

    Args:
        numel: elements of the piece.
        itemsize: bytes of an element.
        requires_grad: the parameter is trained.
        optimizer: its name or text, see ``optimizer_bytes``.
        shape: of the piece, for optimizers that keep sums of rows and columns.

    Raises:
        OptionError: the optimizer is unknown.
    """
    entry = optimizer_bytes(optimizer)
    if not requires_grad:
        return ParameterBytes(numel * itemsize, 0, 0)
    return ParameterBytes(numel * itemsize, numel * itemsize, entry.state_bytes(numel, itemsize, shape))
