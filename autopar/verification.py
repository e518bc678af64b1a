"""What a user calls to check a plan: ``verify`` runs all its ranks in one process against the original module."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.arguments import check_examples, check_module, check_optimizer, check_plan, check_tolerance
from autopar.plans import Plan


def verify(
    model: nn.Module,
    plan: Plan | str | os.PathLike[str],
    example_inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    rtol: float | None = None,
    optimizer: str | None = None,
) -> None:
    """Run every rank of ``plan`` in this process and compare with ``model``; return nothing when all is equal.

    Compared are outputs, every gradient, buffers, and the parameters after one optimizer step. The model is left as is.

    Args:
        model: the original module, with values.
        plan: a plan, or the path of a saved one.
        example_inputs, kwargs: inputs of the shapes that the plan was made for, as in ``autopar.plan``.
        loss: as in ``autopar.plan``, when the plan was made with one.
        rtol: tolerance relative to the largest entry of a tensor; by default 1e-4 in float32, 1e-9 in float64.
        optimizer: which step to compare; the plan's by default. One whose step torch does not have, or that looks at
            more than one element at a time (Adafactor, 8 bits), is compared by a step of AdamW.

    Raises:
        MismatchError: something differs; the message names the first op that does, its module and its source line.
        PlanError: the plan was made for another model or other input shapes.
        InputError: the model has no values (it is on meta).
        OptionError: an argument means nothing.
    """
    from autopar.passes.annotate import annotate
    from autopar.runtime.copy_model import copy_model
    from autopar.runtime.shadow import Source, append_loss, count_targets
    from autopar.runtime.signature import take_apart
    from autopar.runtime.verify_pipeline import verify_pipeline
    from autopar.runtime.verify_ranks import verify_ranks

    check_module(model)
    check_plan(plan)
    check_tolerance(rtol)
    if optimizer is not None:
        optimizer = check_optimizer(optimizer)
    given = plan if isinstance(plan, Plan) else Plan.load(plan)
    args, named = check_examples(example_inputs, kwargs)
    if given.options.inputs == "local":
        args, named = pytree.tree_map(lambda leaf: _global_batch(leaf, given.mesh.sizes[0]), (args, named))
    if loss is not None:
        model = copy_model(model)
        append_loss(model, loss, count_targets(loss))
    call = take_apart(model, args, named, device=None)
    wide = given.options.outputs == "full"
    source = Source.of(model, None)
    program = annotate(source.capture(call, given.mesh, "global", every_output=wide, fingerprint=given.fingerprint))
    check = verify_ranks if given.pipeline is None else verify_pipeline
    check(model, program, given, args, named, rtol=rtol, optimizer=optimizer)


def _global_batch(leaf: Any, parts: int) -> Any:
    """Return a batch of which ``leaf`` is one rank's share: its rows again, in another order for every rank."""
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
        return leaf
    rows = torch.cat([leaf.detach().roll(shift, 0) for shift in range(parts)])
    return rows.requires_grad_(leaf.requires_grad)
