"""Compare all ranks of a plan, run in one process, with the original module: outputs, gradients, buffers, a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.errors import InputError, MismatchError
from autopar.passes.cost.memory import MIXED
from autopar.passes.local_program import LocalProgram
from autopar.passes.lower import lower_ranks
from autopar.passes.program import Program, result_values
from autopar.placement import local_shape
from autopar.plans import Plan

from .copy_model import copy_model
from .locate_mismatch import Tolerance, locate_mismatch
from .simulate import StepResult, assemble, shard, simulate_step

RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Tolerance by dtype, relative to a tensor's largest entry; the coarsest dtype that a program computes in counts."""

_LEARNING_RATE = 1e-2
_EPSILON = 1e-2
_SEED = 20
_ROUNDINGS = 128

_STEPS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"eps": _EPSILON}),
    "adamw": (torch.optim.AdamW, {"eps": _EPSILON}),
    "amsgrad": (torch.optim.AdamW, {"eps": _EPSILON, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"eps": _EPSILON}),
    "rmsprop": (torch.optim.RMSprop, {"eps": _EPSILON}),
}
"""Optimizer -> torch's class and options, of those that move every element by itself."""


@dataclass
class Reference:
    """What the original module computes on one device.

    Attributes:
        leaves: the output's flat leaves.
        gradients: placeholder name -> gradient, None where the module has none.
        buffers: full name -> value after the step; inputs too, which a model may write to.
        values: placeholder name -> the global tensor that the program is fed.
    """

    leaves: list[Any]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    values: dict[str, torch.Tensor] = field(default_factory=dict)


def verify_ranks(
    model: nn.Module,
    program: Program,
    plan: Plan,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    rtol: float | None = None,
    optimizer: str | None = None,
    seed: int = _SEED,
) -> StepResult:
    """Run every rank of ``plan`` and compare with ``model`` on the same values; return what the ranks computed.

    Compared are every output leaf, every gradient, every buffer, and every parameter after one step of the optimizer,
    taken on the whole parameters and on the shards.

    Args:
        args, kwargs: the global batch.
        rtol: tolerance relative to the largest entry of a tensor; by its dtype by default.
        optimizer: its name, see ``make_optimizer``; the plan's by default.

    Raises:
        MismatchError: something differs; the first op that does is named.
        InputError: the model has no values (it is on meta).
    """
    rng = torch.random.get_rng_state()
    try:
        reference = run_original(model, program, args, kwargs or {}, seed)
        programs = lower_ranks(program, plan, run=False)
        torch.manual_seed(seed)
        faults: list[str] = []
        result = None
        try:
            result = simulate_step(programs, reference.values)
            faults = differences(program, result, reference, rtol)
            if not faults:
                faults = step_differences(
                    program, programs, result, reference, optimizer or plan.options.optimizer, rtol
                )
        except MismatchError as error:
            faults = [str(error)]
        if faults or result is None:
            coarsest = _coarsest(program)
            tolerance = Tolerance(rtol or RELATIVE[coarsest], _floor(coarsest) * _largest(reference.values.values()))
            where = locate_mismatch(program, plan, programs, reference.values, tolerance, seed)
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            raise MismatchError(f"the plan does not compute what one device computes: {faults[0]}{more}. {where}")
    finally:
        torch.random.set_rng_state(rng)
    return result


def run_original(
    model: nn.Module, program: Program, args: Sequence[Any], kwargs: Mapping[str, Any], seed: int
) -> Reference:
    """Run a copy of the original module eagerly, forward and backward, and collect what the program should compute.

    The loss has the tangent one; outputs without a loss get random tangents.

    Raises:
        InputError: a parameter or buffer is on meta.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise InputError(
                f"verify runs the model, but {name} is on meta and has no value; "
                "build the model on the cpu, or fill it after model.to_empty(device='cpu')"
            )
    copied = copy_model(model).cpu()
    copied.zero_grad(set_to_none=True)
    flat, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    for role in program.inputs:
        if role.kind == "input":
            flat[role.index] = flat[role.index].detach().cpu().clone().requires_grad_(role.requires_grad)
    named = dict(copied.named_parameters(remove_duplicate=False)) | dict(copied.named_buffers(remove_duplicate=False))
    values = {
        role.node: (flat[role.index] if role.kind == "input" else named[role.name]).detach().clone()
        for role in program.inputs
        if role.kind != "tangent"
    }
    call_args, call_kwargs = pytree.tree_unflatten(flat, spec)
    torch.manual_seed(seed)
    with torch.set_grad_enabled(any(role.kind == "tangent" for role in program.inputs)):
        leaves = pytree.tree_leaves(copied(*call_args, **call_kwargs))
    generator = torch.Generator().manual_seed(seed)
    roots, tangents = [], []
    for role in program.inputs:
        if role.kind == "tangent":
            leaf = leaves[role.index]
            values[role.node] = (
                torch.ones_like(leaf)
                if role.index == program.loss
                else torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)
            ).detach()
            roots.append(leaf)
            tangents.append(values[role.node])
    if roots:
        torch.autograd.backward(roots, tangents)
    gradients = {
        role.node: (flat[role.index] if role.kind == "input" else named[role.name]).grad
        for role in program.inputs
        if role.kind in ("parameter", "input")
    }
    buffers = {name: buffer.detach() for name, buffer in copied.named_buffers()}
    buffers |= {role.name: flat[role.index].detach() for role in program.inputs if role.kind == "input"}
    return Reference([_detached(leaf) for leaf in leaves], gradients, buffers, values)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _coarsest(program: Program) -> torch.dtype:
    """Return the floating dtype of least precision among all that a program computes; float32 if there is none.

    A model may compute in a coarser dtype than its parameters have, as under autocast.
    """
    dtypes = {value.dtype for node in program.graph.nodes for _, value in result_values(node)}
    return max(sorted(dtypes & RELATIVE.keys(), key=str), key=RELATIVE.__getitem__, default=torch.float32)


def differences(program: Program, result: StepResult, reference: Reference, rtol: float | None) -> list[str]:
    """Return one text an output, gradient or buffer that is not what the original computes."""
    found = list(zip(program.outputs, result.values))
    scale, coarsest = _largest(reference.values.values()) / 16, _coarsest(program)
    leaves = {role.index: (role, value) for role, value in found if role.kind == "output"}
    faults = []
    for index, leaf in enumerate(reference.leaves):
        role, value = leaves[index]
        if isinstance(leaf, torch.Tensor):
            faults += _compare(f"the output {role.name}", leaf, value, _tolerance(leaf, coarsest, rtol, scale))
        elif leaf != role.constant:
            faults.append(f"the output {role.name} is {role.constant!r}, not {leaf!r}")
    largest = _largest(reference.gradients.values())
    for role, value in found:
        if role.kind == "gradient":
            expected = reference.gradients.get(role.of)
            faults += _compare(
                f"the gradient of {role.name}", expected, value, _tolerance(expected, coarsest, rtol, largest)
            )
    new = {role.name: value for role, value in found if role.kind == "buffer"}
    kept = [r for r in program.inputs if r.kind in ("buffer", "input") and r.node in reference.values]
    old, kinds = {r.name: reference.values[r.node] for r in kept}, {r.name: r.kind for r in kept}
    for name, buffer in reference.buffers.items():
        if name in old:
            allowed = _tolerance(buffer, coarsest, rtol, scale)
            faults += _compare(f"the {kinds[name]} {name}", buffer, new.get(name, old[name]), allowed)
    return faults


def _floor(dtype: torch.dtype) -> float:
    """Return how far, relative to the largest value around, what is zero in exact arithmetic may be from zero."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    relative = RELATIVE.get(dtype, 1e-4)
    return min(relative, max(_ROUNDINGS * torch.finfo(dtype).eps, relative / 100))


def _largest(tensors: Iterable[torch.Tensor | None]) -> float:
    """Return the largest finite magnitude of all floating tensors."""
    present = [t[t.isfinite()].abs() for t in tensors if t is not None and (t.is_floating_point() or t.is_complex())]
    return max((float(t.max()) for t in present if t.numel()), default=0.0)


def _tolerance(
    expected: torch.Tensor | None, coarsest: torch.dtype, rtol: float | None, largest: float = 0.0
) -> Tolerance:
    """Return the tolerance of a tensor, which may also be off by some rounding of ``largest`` in ``coarsest``.

    Some values are zero in exact arithmetic (the gradient of the bias of an attention's keys, the mean of what is
    centred): nothing but rounding is left of them.
    """
    if expected is None or not (expected.is_floating_point() or expected.is_complex()):
        return Tolerance(0.0)
    dtype = max(expected.dtype, coarsest, key=lambda kind: RELATIVE.get(kind, 1e-4))
    return Tolerance(rtol or RELATIVE.get(dtype, 1e-4), _floor(dtype) * largest)


def _compare(what: str, expected: torch.Tensor | None, found: torch.Tensor | None, tolerance: Tolerance) -> list[str]:
    if expected is None or found is None:
        present = expected if expected is not None else found
        if present is None or not bool(present.any()):
            return []
        return [f"{what} is {'missing' if found is None else 'there, though the original has none'}"]
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return [
            f"{what} is {found.dtype} of shape {tuple(found.shape)}, "
            f"the original {expected.dtype} of shape {tuple(expected.shape)}"
        ]
    gap = tolerance.excess(expected, found)
    if gap is None:
        return []
    return [f"{what} differs by {gap:.3g} where the largest entry is {float(expected.abs().max()):.3g}"]


def make_optimizer(name: str, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer for one comparable step; AdamW where torch has none that works element by element.

    ``eps`` is large: with a small one, Adam's first step turns the rounding of a gradient that is zero into a whole
    step.
    """
    kind, options = _STEPS.get(name.removesuffix(MIXED), _STEPS["adamw"])
    return kind(parameters, lr=_LEARNING_RATE, **options)


def step_differences(
    program: Program,
    programs: Sequence[LocalProgram],
    result: StepResult,
    reference: Reference,
    optimizer: str,
    rtol: float | None,
) -> list[str]:
    """Step the whole parameters with eager gradients and every rank's shards with its own; compare the parameters.

    A gradient that is within its tolerance moves a parameter of Adam by at most that times learning rate / epsilon.
    """
    mesh = programs[0].mesh
    largest, coarsest = _largest(reference.gradients.values()), _coarsest(program)
    faults = []
    for index, role in enumerate(program.outputs):
        whole = reference.values.get(role.of)
        gradient = reference.gradients.get(role.of)
        if role.kind != "gradient" or role.node is None or whole is None or gradient is None:
            continue
        layout = programs[0].input_layouts[role.of]
        expected = _stepped(optimizer, whole, gradient)
        pieces = []
        for program_of_rank, local in zip(programs, result.local):
            piece, slope = shard(whole, layout, mesh, program_of_rank.coordinate), local[index]
            own = local_shape(whole.shape, layout, mesh.sizes, program_of_rank.coordinate)
            if slope is None or tuple(slope.shape) != own:
                return [f"the gradient of {role.name} does not have the shape {own} of its shard"]
            pieces.append(_stepped(optimizer, piece, slope))
        found = assemble(pieces, layout, whole.shape, mesh, f"{role.name} after a step")
        allowed = _tolerance(gradient, coarsest, rtol, largest)
        gap = allowed.relative * float(gradient.abs().max()) + allowed.absolute if gradient.numel() else 0.0
        tolerance = Tolerance(allowed.relative, gap * _LEARNING_RATE / _EPSILON)
        faults += _compare(f"{role.name} after a step of {optimizer}", expected, found, tolerance)
    return faults


def _stepped(optimizer: str, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    moved = parameter.detach().clone()
    moved.grad = gradient.detach().clone()
    make_optimizer(optimizer, [moved]).step()
    return moved
