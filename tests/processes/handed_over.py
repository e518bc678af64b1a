"""What the ranks of a pool run: backwards whose gradients somebody watches, asks for, or adds to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.processes.compare import build, loss_of, split


def gradients(how: str) -> list[tuple[Tensor, Tensor]]:
    """Return every gradient of a split module beside that of one device, by the way that ``how`` names."""
    built = build("mlp", 0.0)
    parallel, model = split(built, (2,), "best")
    found: list[list[Any]] = []
    for module in (parallel, model):
        parameters = list(module.parameters())
        seen: dict[int, Any] = {}

        def loss(module: Any = module) -> Tensor:
            return loss_of(module(*built[1], **built[2]))

        if how == "grad":
            got = list(torch.autograd.grad(loss(), parameters))
            assert all(parameter.grad is None for parameter in parameters)
        elif how == "inputs":
            loss().backward(inputs=parameters[:1])
            assert all(parameter.grad is None for parameter in parameters[1:])
            got = [parameters[0].grad]
        elif how == "hooks":
            parameters[0].register_hook(lambda grad: grad * 3)
            parameters[1].register_post_accumulate_grad_hook(lambda p, seen=seen: seen.update({1: p.grad.clone()}))
            loss().backward()
            assert seen
            got = [parameter.grad for parameter in parameters]
        elif how == "beside":
            (loss() + sum((parameter.square().sum() for parameter in parameters), torch.zeros(()))).backward()
            got = [parameter.grad for parameter in parameters]
        elif how == "kept":
            kept = loss()
            kept.backward(retain_graph=True)
            kept.backward(retain_graph=True)
            kept.backward()
            got = [parameter.grad for parameter in parameters]
        else:
            for _ in range(2):
                loss().backward()
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad.zero_()  # as zero_grad(set_to_none=False)
            loss().backward(retain_graph=True)
            got = [parameter.grad for parameter in parameters]
        found.append([grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in got])
    return list(zip(*found, strict=True))
