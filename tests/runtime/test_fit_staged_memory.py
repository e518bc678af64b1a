"""A budget on a mesh with stages bounds what a rank keeps of all the micro-batches in flight."""

from __future__ import annotations

import pytest

from autopar.errors import InfeasibleError
from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.plans import Options
from autopar.runtime.fit_staged_memory import fit_staged_memory
from tests import models


def test_the_edge_of_feasibility() -> None:
    """What is promised is kept; a budget far too small is refused, and the budget that the refusal names has a plan."""
    model, args, kwargs = models.mlp(dropout=0.0)
    program = annotate(capture(model, args, kwargs))
    mesh = Mesh((2, 2), ("pp", "data"), device="cpu")
    free = fit_staged_memory(program, mesh, Options(micro_batches=4, schedule="gpipe"))
    same = Options(micro_batches=4, schedule="gpipe", memory=free.memory.total_bytes)
    assert fit_staged_memory(program, mesh, same).memory.total_bytes <= free.memory.total_bytes
    with pytest.raises(InfeasibleError, match="2 stages and 4 micro-batches of gpipe; with") as raised:
        fit_staged_memory(program, mesh, Options(micro_batches=4, schedule="gpipe", memory=16))
    least = raised.value.least_bytes
    assert least is not None
    asked = Options(micro_batches=4, schedule="gpipe", memory=least)
    found = fit_staged_memory(program, mesh, asked)
    assert found.memory.total_bytes <= least
    assert found.options == asked
