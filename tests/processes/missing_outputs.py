"""What the ranks of a pool run: backwards that reach all outputs of a module, or some. Returns plain data."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.complete_plan import complete_plan
from benchmarks.memory import batch_choices
from tests.processes.compare import gradients, state, worst

Errors = dict[str, tuple[float, str]]


class Heads(nn.Module):
    """Two heads on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.left, self.right = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return both heads."""
        hidden = self.trunk(x).tanh()
        return self.left(hidden), self.right(hidden)


def some_outputs(sizes: tuple[int, ...]) -> Errors:
    """Train data parallel with two backwards a step: the gradients of whole ones wait, those of others do not."""
    model = Heads()
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    reference = copy.deepcopy(model)
    program = annotate(capture(model, (x,)))
    plan = complete_plan(program, Mesh(sizes), batch_choices(program), {})
    parallel = autopar.parallelize(model, sizes, (x,), plan=plan)
    errors: Errors = {}
    both = [(module, torch.optim.SGD(module.parameters(), lr=0.1)) for module in (parallel, reference)]
    for step, reached in enumerate([(2, 2), (2, 2), (2, 1), (1, 2), (1, 1), (2, 2)]):
        for module, _ in both:
            for count in reached:
                sum(out.square().sum() for out in module(x)[:count]).backward()
        errors[f"gradients of step {step}"] = worst(gradients(parallel), gradients(reference))
        for _, optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    errors["state"] = worst(state(parallel), state(reference))
    return errors if dist.get_rank() == 0 else {}
