"""Fixtures of the runtime's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from autopar.mesh import Mesh
from autopar.runtime.groups import MeshGroups, connect


@pytest.fixture
def groups() -> Iterator[MeshGroups]:
    """Return the processes of a world of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield connect(lambda: Mesh((1, 1)))
    finally:
        dist.destroy_process_group()
