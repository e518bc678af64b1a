"""Run a captured program on real tensors beside the model it came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.passes.program import Program


@dataclasses.dataclass
class Step:
    """What one step computes: output leaves by position, gradients and new buffers by name."""

    outputs: dict[int, Any]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer by its full name, tied ones under each."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def numbers_of(like: Tensor, seed: int | None) -> Tensor:
    """Return real numbers of the shape and dtype of a fake tensor: random ones, or ones without a seed."""
    if seed is None:
        return torch.ones(like.shape, dtype=like.dtype)
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like.dtype)


def tangents_of(program: Program) -> dict[int, Tensor]:
    """Return a fixed tangent for every output leaf that has one: one for a loss, random numbers for the rest."""
    placeholders = program.nodes()
    out = {}
    for role in program.inputs:
        if role.kind == "tangent":
            val = placeholders[role.node].meta["val"]
            out[role.index] = numbers_of(val, None if role.index == program.loss else role.index)
    return out


def run_program(program: Program, model: nn.Module, args: Any, kwargs: Any, seed: int = 0) -> Step:
    """Run a program on a model's state and inputs."""
    state, tangents = state_of(model), tangents_of(program)
    leaves = pytree.tree_leaves((tuple(args), kwargs))
    values = []
    for role in program.inputs:
        source: Any = state if role.kind in ("parameter", "buffer") else leaves if role.kind == "input" else tangents
        values.append(source[role.name] if source is state else source[role.index])
    torch.manual_seed(seed)
    with torch.no_grad():
        results = program.graph_module(*[v.detach().clone() for v in values])
    step = Step({}, {}, {})
    for role, result in zip(program.outputs, results, strict=True):
        if role.kind == "output":
            step.outputs[role.index] = result if role.node else role.constant
        elif role.kind == "gradient":
            step.gradients[role.name] = result
        else:
            step.buffers[role.name] = result
    return step


def run_eager(program: Program, model: nn.Module, args: Any, kwargs: Any, seed: int = 0) -> Step:
    """Run the model itself, forward and backward with the tangents of ``run_program``."""
    torch.manual_seed(seed)
    with torch.set_grad_enabled(program.training):
        result = model(*args, **kwargs)
    leaves = pytree.tree_leaves(result)
    if len(leaves) == 1 and dataclasses.is_dataclass(leaves[0]):
        leaves = [getattr(leaves[0], field.name) for field in dataclasses.fields(leaves[0])]
    tangents = tangents_of(program)
    if tangents:
        torch.autograd.backward([leaves[i] for i in tangents], list(tangents.values()))
    state, inputs = state_of(model), pytree.tree_leaves((tuple(args), kwargs))
    step = Step(dict(enumerate(leaves)), {}, {})
    for role in program.outputs:
        if role.kind == "gradient":
            source = program.input_of(role.of)
            step.gradients[role.name] = (state[role.name] if source.kind == "parameter" else inputs[source.index]).grad
        elif role.kind == "buffer":
            step.buffers[role.name] = state[role.name]
    return step


def _named(name: str) -> Callable[[str], str]:
    return lambda message: f"{name}: {message}"


def assert_same_step(one: Step, other: Step, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Assert that two steps agree; gradients to within ``atol`` of the largest gradient of the step."""
    assert one.outputs.keys() == other.outputs.keys()
    for index, value in one.outputs.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(value, other.outputs[index], rtol=rtol, atol=atol, msg=_named(str(index)))
        else:
            assert value == other.outputs[index]
    assert one.gradients.keys() == other.gradients.keys()
    largest = max((float(g.abs().max()) for g in one.gradients.values() if g is not None and g.numel()), default=0.0)
    for name, grad in one.gradients.items():
        twin = other.gradients[name]
        assert (grad is None) == (twin is None), f"{name}: {grad} against {twin}"
        if grad is not None:
            near = atol * max(1.0, largest)
            torch.testing.assert_close(grad, twin, rtol=rtol, atol=near, msg=_named(f"gradient of {name}"))
    assert one.buffers.keys() == other.buffers.keys()
    for name, buffer in one.buffers.items():
        torch.testing.assert_close(buffer, other.buffers[name], rtol=rtol, atol=atol)


def values_of(program: Program, model: nn.Module, args: Any, kwargs: Any) -> dict[str, Tensor]:
    """Return the value of every placeholder but the tangents: the model's state, and the inputs."""
    state, leaves = state_of(model), pytree.tree_leaves((tuple(args), kwargs))
    return {
        role.node: leaves[role.index] if role.kind == "input" else state[role.name].detach()
        for role in program.inputs
        if role.kind != "tangent"
    }
