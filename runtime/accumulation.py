"""Gradients over several backwards before a step of the optimizer: reduced once, with the last of them.

Between them a gradient that can wait is a DTensor of partial sums, which means the right value in whatever reads it.
How many backwards a step has is known from the step before; where there are fewer this time, the optimizer's step
reduces what is left. All of it happens alike on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from autopar.passes.defer_reductions import defer_reductions
from autopar.passes.improve.setting import Setting
from autopar.passes.local_program import LocalProgram
from autopar.placement import Layout
from autopar.runtime.carry_hooks import is_watched
from autopar.runtime.optimizer_steps import steps_taken
from autopar.runtime.own_memory import lone_results

Ready = Callable[[fx.GraphModule], fx.GraphModule]


@dataclass
class Holding:
    """Whether all gradients are asked to wait, scattered ones too: inside ``ParallelModule.no_sync``."""

    on: bool = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Ask for it inside ``with``."""
        before, self.on = self.on, True
        try:
            yield
        finally:
            self.on = before


class Accumulation:
    """Counts the backwards of one program between two steps of the optimizer."""

    def __init__(self) -> None:
        self._step = steps_taken()
        self._count, self._expected = 0, 1

    def more_follow(self) -> bool:
        """Count one backward; tell whether the step before had more of them than this one has by now."""
        if self._step != steps_taken():
            self._step, self._expected, self._count = steps_taken(), self._count, 0
        self._count += 1
        return self._count < self._expected


@dataclass(frozen=True)
class WaitingBackward:
    """The backward in the forms of ``passes/defer_reductions.py``, bound to process groups.

    Attributes:
        without, resumed: as there.
        lone: which results of ``without`` lie alone in memory.
        layouts: of the sums, by the position of the gradient among the results.
        slots: placeholders of the forward whose gradients these are.
    """

    without: fx.GraphModule
    resumed: fx.GraphModule
    lone: tuple[bool, ...]
    layouts: dict[int, Layout]
    slots: tuple[int, ...]

    @classmethod
    def of(
        cls,
        local: LocalProgram,
        positions: Sequence[int | None],
        ready: Ready,
        setting: Setting,
        *,
        scattered: bool = False,
    ) -> WaitingBackward | None:
        """Return them for a lowered program, None where no gradient can wait.

        Args:
            local: the program.
            positions: where the gradient of each placeholder of the forward is among the results.
            ready: makes a graph of a lowered program run here.
            setting: of the program's plan.
            scattered: gradients that are reduced and scattered wait too, whole.
        """
        found = defer_reductions(local, scattered=scattered)
        if found is None:
            return None
        layouts = dict(zip(found.positions, found.layouts, strict=True))
        return cls(
            ready(found.without),
            ready(found.resumed),
            lone_results(found.without, setting),
            layouts,
            tuple(positions.index(position) for position in found.positions),
        )


def may_wait(parameters: Sequence[Tensor], patterns: Sequence[DTensor], holding: Holding) -> bool:
    """Tell whether gradients may wait now.

    A hook looks at the gradient of each backward, which is not known while it waits. What an earlier backward reduced
    is not added to sums that are not.

    Args:
        parameters: whose gradients may wait.
        patterns: a DTensor of each one's partial sums, for its placements.
        holding: whether they were asked to.
    """
    if any(is_watched(parameter) for parameter in parameters):
        return False
    grads = [parameter.grad for parameter in parameters]
    return not holding.on or all(
        grad is None or (isinstance(grad, DTensor) and grad.placements == pattern.placements)
        for grad, pattern in zip(grads, patterns, strict=True)
    )


def earlier_sums(parameters: Sequence[Tensor], patterns: Sequence[DTensor]) -> list[Tensor] | None:
    """Take the partial sums that earlier backwards left, one a parameter; None if there are none at all.

    Args:
        parameters: whose gradients may wait.
        patterns: a DTensor of each one's partial sums, for its placements.
    """
    held = [
        isinstance(grad, DTensor) and grad.placements == pattern.placements
        for grad, pattern in zip((parameter.grad for parameter in parameters), patterns)
    ]
    if not any(held):
        return None
    sums: list[Tensor] = []
    for parameter, pattern, there in zip(parameters, patterns, held):
        grad = parameter.grad
        if there and isinstance(grad, DTensor):
            sums.append(grad.to_local())
            parameter.grad = None
        else:
            local = pattern.to_local()
            sums.append(torch.zeros(local.shape, dtype=local.dtype, device=parameter.device))
    return sums


def settle(gradients: Sequence[Tensor | None], parameters: Mapping[int, Tensor]) -> None:
    """Reduce the sums that waiting backwards left where a gradient arrives that lies otherwise. Collective then.

    Args:
        gradients: that will be accumulated.
        parameters: whose they are, by position.
    """
    for position, parameter in parameters.items():
        new, held = gradients[position], parameter.grad
        if isinstance(new, DTensor) and isinstance(held, DTensor) and new.placements != held.placements:
            reduce_sums(parameter)


def _reduce_the_rest(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            reduce_sums(parameter)


def reduce_sums(parameter: Tensor) -> None:
    """Reduce the gradient of a parameter if it is a partial sum. Collective then."""
    grad = parameter.grad
    if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
        assert isinstance(parameter, DTensor)
        parameter.grad = grad.redistribute(placements=parameter.placements)


register_optimizer_step_pre_hook(_reduce_the_rest)
