"""Draws for the generators of op arguments, and their registry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

FLOATS = (torch.float64, torch.float32, torch.bfloat16)
WIDE = (torch.float64, torch.float32)


class Draw:
    """Draws for one op: sizes and options by hypothesis, numbers by torch from a drawn seed."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self.draw = draw
        self.generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
        self.dtype = torch.float32

    def int(self, low: int, high: int) -> int:
        """Draw an int of ``[low, high]``."""
        return int(self.draw(st.integers(low, high)))

    def bool(self) -> bool:
        """Draw a truth value."""
        return bool(self.draw(st.booleans()))

    def of(self, values: Sequence[Any]) -> Any:
        """Draw one of ``values``."""
        return self.draw(st.sampled_from(list(values)))

    def size(self) -> int:
        """Draw the size of a dim: sometimes 1, often one that no axis divides."""
        return int(self.draw(st.sampled_from([6, 1, 2, 3, 4, 5, 7, 8, 12])))

    def shape(self, low: int = 0, high: int = 4) -> tuple[int, ...]:
        """Draw a shape of ``[low, high]`` dims."""
        return tuple(self.size() for _ in range(self.int(low, high)))

    def float(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return random floating point numbers."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(dtype or self.dtype)

    def index(self, high: int, *shape: int) -> Tensor:
        """Return random indices below ``high``."""
        return torch.randint(0, high, shape, generator=self.generator)

    def mask(self, *shape: int) -> Tensor:
        """Return random truth values."""
        return torch.rand(shape, generator=self.generator) > 0.5

    def dim(self, rank: int) -> int:
        """Draw a dim of a tensor, counted from either end."""
        return self.int(-rank, rank - 1) if rank else self.int(-1, 0)


Generator = Callable[[Draw], Arguments]
GENERATORS: dict[Any, Generator] = {}


def generates(*targets: Any, dtypes: Sequence[torch.dtype] = FLOATS) -> Callable[[Generator], Generator]:
    """Enter a generator for ``targets``; it draws ``Draw.dtype`` of ``dtypes`` first."""

    def enter(function: Generator) -> Generator:
        def with_dtype(draw: Draw) -> Arguments:
            draw.dtype = draw.of(dtypes)
            return function(draw)

        for target in targets:
            GENERATORS[target] = with_dtype
        return function

    return enter


def broadcast(d: Draw, full: tuple[int, ...]) -> tuple[int, ...]:
    """Draw a shape that broadcasts to ``full``."""
    kept = tuple(1 if d.int(0, 3) == 0 else size for size in full)
    return kept[d.of([0, 0, 0, min(1, len(full))]) :]
