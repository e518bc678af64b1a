"""What the ranks of a pool run: steps whose collectives are counted where torch dispatches them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.complete_plan import complete_plan
from autopar.passes.local_program import group_axes
from autopar.plans import Options
from autopar.report.technique import parameter_techniques
from autopar.runtime.sum_on_boards import SmallSum
from benchmarks.memory import batch_choices
from tests.processes.compare import build, loss_of, split

Move = tuple[str, int, int]
"""The kind of a collective, its axis and the bytes handed in."""

_KINDS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}

DTENSORS_OWN = -1
"""Stands for the axis of what DTensor moves by itself, over groups of its own."""


class Counting(TorchDispatchMode):
    """Counts every functional collective, once an axis, and sums on boards; agreements on the host are others.

    Args:
        names: what lowered graphs call a group -> the name of the process group.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__()
        self.axes = {name: group_axes(word) for word, name in names.items()}
        self.moves: list[Move] = []
        self.called: list[tuple[int, ...]] = []

    def __enter__(self) -> Counting:
        post = self._post = SmallSum.post

        def counted(small: SmallSum, part: torch.Tensor) -> int:
            self.moves.append(("all_reduce", small.axis, part.numel() * part.element_size()))
            return post(small, part)

        SmallSum.post = counted  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        SmallSum.post = self._post  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _KINDS.get(str(func.overloadpacket).rpartition(".")[2].removesuffix("_").removesuffix("_coalesced"))
        if func.namespace == "_c10d_functional" and kind is not None:
            along = (self.axes[arg] for arg in args if isinstance(arg, str) and arg in self.axes)
            self.called.append(next(along, (DTENSORS_OWN,)))
            for axis in self.called[-1]:
                for handed in args[0] if isinstance(args[0], (list, tuple)) else [args[0]]:
                    self.moves.append((kind, axis, handed.numel() * handed.element_size()))
        return func(*args, **(kwargs or {}))


def count_accumulated(sizes: tuple[int, ...]) -> tuple[list[int], int, list[str], float]:
    """Return the bytes gathered in three backwards, then in one behind a step of the optimizer, and the techniques.

    Beside them the bytes of gathers in each forward whose copies are not kept. The last value is the largest difference
    of a gradient from one device's.
    """
    built = build("mlp")
    _, args, kwargs = built
    parallel, model = split(built, sizes, constraints={"*.weight": "zero3"})
    groups = parallel._engine.groups
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    alone = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    worst = 0.0
    for backwards in (3, 1):
        counting = Counting(groups.names)
        with counting:
            for _ in range(backwards):
                loss_of(parallel(*args, **kwargs)).backward()
        for _ in range(backwards):
            loss_of(model(*args, **kwargs)).backward()
        counts.append(sum(num_bytes for kind, _, num_bytes in counting.moves if kind == "all_gather"))
        for mine, whole in zip(parallel.parameters(), model.parameters(), strict=True):
            worst = max(worst, float((mine.grad.full_tensor() - whole.grad).abs().max()))
        for each in (optimizer, alone):
            each.step()
            each.zero_grad()
    rows = [row for row in parallel.plan.collectives if row.kind == "all_gather"]
    each_time = sum(row.bytes for row in rows if row.tensor not in parallel.plan.saved)
    return counts, each_time, [word for words in parameter_techniques(parallel.plan).values() for word in words], worst


def count_reductions(sizes: tuple[int, ...], backwards: tuple[int, ...]) -> tuple[list[int], int, float]:
    """Return the bytes that each step of data parallelism sums, those of all gradients, and the largest difference.

    Args:
        sizes: of the mesh.
        backwards: how many each step has.
    """
    return _train(sizes, tuple("o" * count for count in backwards), "all_reduce", {})


def over_all(sizes: tuple[int, ...], choices: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return choices of one axis on every axis that has several ranks."""
    return {name: tuple(one if n > 1 else "replicate" for n in sizes) for name, (one,) in choices.items()}


def count_joint(sizes: tuple[int, ...], disable: tuple[str, ...]) -> tuple[list[tuple[int, ...]], list[Move], float]:
    """Return the axes of each collective of a data parallel step, what moved, and the largest difference of a gradient.

    Args:
        sizes: of the mesh, whose axes all split the batch.
        disable: passes that are left out.
    """
    built = build("mlp")
    _, args, kwargs = built
    program = annotate(capture(built[0], args, kwargs))
    choices = over_all(sizes, batch_choices(program))
    plan = complete_plan(program, Mesh(sizes), choices, {}, options=Options(disable=disable))
    parallel, model = split(built, sizes, plan=plan)
    pairs = list(zip(parallel.parameters(), model.parameters(), strict=True))
    with torch.no_grad():  # the first rank's values, so that every rank sees whether its own gradients are right
        for mine, whole in pairs:
            whole.copy_(mine.full_tensor())  # type: ignore[attr-defined]
    counting = Counting(parallel._engine.groups.names)
    with counting:
        loss_of(parallel(*args, **kwargs)).backward()
    loss_of(model(*args, **kwargs)).backward()
    return counting.called, counting.moves, max(difference(mine.grad, whole.grad) for mine, whole in pairs)


def count_held(sizes: tuple[int, ...], steps: tuple[str, ...]) -> tuple[list[float], float]:
    """Return how often each step of sharded data parallelism reduces all gradients, and the largest difference.

    Args:
        sizes: of the mesh.
        steps: as ``_train`` takes them; the first reduces once.
    """
    names = [name for name, _ in build("mlp")[0].named_parameters()]
    counts, _, worst = _train(sizes, steps, "reduce_scatter", {name: (0,) * len(sizes) for name in names})
    return [count / counts[0] for count in counts], worst


def _train(
    sizes: tuple[int, ...], steps: tuple[str, ...], kind: str, rest: dict[str, tuple[int, ...]]
) -> tuple[list[int], int, float]:
    """Return the bytes that each step moves by one kind, those of all parameters, and the largest difference.

    Gradients are compared with one device's after every backward, parameters after every step.

    Args:
        sizes: of the mesh.
        steps: one letter a backward of a step: ``h`` inside ``no_sync``, ``w`` there with a hook,
            ``o`` outside.
        kind: of the collectives that are counted.
        rest: parameter -> layout where it rests, whole by default.
    """
    built = build("mlp")
    _, args, kwargs = built
    program = annotate(capture(built[0], args, kwargs))
    choices = over_all(sizes, batch_choices(program))
    plan = complete_plan(program, Mesh(sizes), choices, rest)
    parallel, model = split(built, sizes, plan=plan)
    groups = parallel._engine.groups
    pairs = list(zip(parallel.parameters(), model.parameters(), strict=True))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (parallel, model)]
    counts, worst = [], 0.0
    for letters in steps:
        counting = Counting(groups.names)
        for letter in letters:
            hook = pairs[0][0].register_hook(lambda gradient: None) if letter == "w" else None
            with counting, nullcontext() if letter == "o" else parallel.no_sync():
                loss_of(parallel(*args, **kwargs)).backward()
            if hook is not None:
                hook.remove()
            loss_of(model(*args, **kwargs)).backward()
            worst = max(worst, *(difference(mine.grad, whole.grad) for mine, whole in pairs))
        with counting:
            optimizers[0].step()
        optimizers[1].step()
        worst = max(worst, *(difference(mine, whole) for mine, whole in pairs))
        counts.append(sum(num_bytes for found, _, num_bytes in counting.moves if found == kind))
        for each in optimizers:
            each.zero_grad()
    return counts, sum(parameter.nbytes for parameter in model.parameters()), worst


def difference(mine: Any, whole: torch.Tensor) -> float:
    """Return the largest difference of a DTensor from a plain tensor."""
    return float((mine.full_tensor() - whole).detach().abs().max())


def count_collectives(name: str, sizes: tuple[int, ...], how: str) -> tuple[list[Move], list[Move]]:
    """Run forward and backward; return what ran on this rank and what the plan lists."""
    built = build(name)
    parallel, _ = split(built, sizes, how)
    groups = parallel._engine.groups
    counting = Counting(groups.names)
    parallel.train()
    with torch.enable_grad(), counting:
        loss_of(parallel(*built[1], **built[2])).backward()
    return counting.moves, [(row.kind, row.axis, row.bytes) for row in parallel.plan.collectives]
