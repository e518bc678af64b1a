"""Started by torchrun: one rank fails in the second step, in the place that the command line names."""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch.distributed.elastic.multiprocessing.errors import record

import autopar
from tests import models


@record
def main() -> None:
    """Train; rank 1 fails in step 1."""
    where, odd = sys.argv[1], int(os.environ["RANK"]) == 1
    model, args, kwargs = models.mlp()
    parallel = autopar.parallelize(model, (int(os.environ["WORLD_SIZE"]),), args, kwargs)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for step in range(3):
        if odd and step == 1 and where == "forward":
            raise ValueError("boom before the forward")
        loss = parallel(*args, **kwargs)
        if odd and step == 1 and where == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
    print("finished", flush=True)


if __name__ == "__main__":
    main()
