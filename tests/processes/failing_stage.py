"""Started by torchrun: the middle one of three stages fails in a micro-batch of the second step."""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

import autopar
from autopar.runtime.pipeline import Stage


def break_stage() -> None:
    """Let every forward of the second micro-batch fail."""
    run = Stage.run

    def failing(self: Stage, when: str, micro_batch: int) -> None:
        if when == "forward" and micro_batch == 1:
            raise ValueError("boom in a stage")
        run(self, when, micro_batch)

    Stage.run = failing  # type: ignore[method-assign]


@record
def main() -> None:
    """Train; rank 1 fails in step 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    mesh = autopar.Mesh((3,), ("pp",))
    parallel = autopar.parallelize(model, mesh, (x, y), loss=nn.functional.mse_loss, micro_batches=4, cuts=["2", "4"])
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for step in range(3):
        if step == 1 and int(os.environ["RANK"]) == 1:
            break_stage()
        parallel(x, y).backward()
        optimizer.step()
    print("finished", flush=True)


if __name__ == "__main__":
    main()
