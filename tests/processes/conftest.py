"""Process pools, one a size, for the whole session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.processes.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Pool]]:
    """Return a function from world size to the pool of that size."""
    pools: dict[int, Pool] = {}

    def of(size: int) -> Pool:
        return pools.setdefault(size, Pool(size))

    yield of
    for each in pools.values():
        each.stop()
