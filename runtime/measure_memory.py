"""Measure the bytes that are alive while a lowered program runs, by following tensor storages."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.passes.collective_calls import IN_PLACE, WAIT
from autopar.passes.cost.live_bytes import kept_positions
from autopar.passes.cost.storages import LiveBytes, StorageLog, kernels_of
from autopar.passes.flatten_buckets import flatten_buckets
from autopar.passes.insert_collectives import COLLECTIVES
from autopar.passes.local_program import LocalProgram
from autopar.passes.torch_private import take_arguments_in_a_list
from autopar.runtime.own_memory import Owned
from autopar.runtime.simulate import shard
from autopar.runtime.state import local_of

MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


class MemoryMeter:
    """Measures the live bytes of what runs inside ``with meter:``, on this process.

    Tensors that exist already are told to it by ``hold``; what runs may be anything: a step of a parallel module, its
    optimizer, ordinary code. Storages are counted once each, however many tensors share them.

    >>> meter = MemoryMeter()
    >>> x = torch.ones(1000)
    >>> meter.hold("inputs", [x])
    >>> with meter:
    ...     y = (x + 1).sum()
    >>> meter.result().parts["inputs"], meter.result().peak_bytes
    (4000, 8004)
    """

    def __init__(self, device: str = "cpu") -> None:
        self._log = StorageLog(kernels_of(device), _running)
        self._start = 0

    def hold(self, kind: str, tensors: Iterable[Tensor | None]) -> None:
        """Say what tensors are for, one of ``storages.KINDS``: before, those that exist; afterwards, those that came.

        What was said first counts. A DTensor stands for its local tensor.
        """
        self._log.hold(kind, [local_of(tensor) for tensor in tensors if tensor is not None])

    def hold_module(self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Hold the parameters, gradients and buffers of a module, and the state of its optimizer."""
        self.hold("parameters", module.parameters())
        self.hold("gradients", [parameter.grad for parameter in module.parameters()])
        self.hold("buffers", module.buffers())
        if optimizer is not None:
            self.hold("optimizer", state_tensors(optimizer))

    def hold_rest(self, kind: str) -> None:
        """Say what all that lives and has been told nothing of is for: between forward and backward, it is saved."""
        self._log.hold_rest(kind)

    def __enter__(self) -> MemoryMeter:
        self._start = len(self._log.account.events)
        self._log.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._log.__exit__(*error)

    def result(self) -> LiveBytes:
        """Return the moment of most bytes since the meter was last entered."""
        return self._log.account.highest(self._start)


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return every tensor of an optimizer's state; of a DTensor its local tensor."""
    return [
        local_of(value) for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
    ]


def measure_rank(
    local: LocalProgram, values: Mapping[str, Tensor], optimizer: MakeOptimizer | None = None
) -> LiveBytes:
    """Run one forward and backward of a single rank as the executor runs them, and return its most live bytes.

    No other rank runs: a collective allocates what it would, and fills it with the rank's own piece. So the numbers
    that come out mean nothing, but shapes, lifetimes and copies are those of a real process.

    Args:
        local: what the rank runs.
        values: placeholder name -> global tensor, without tangents.
        optimizer: makes one from the rank's trained parameters; a step before the measurement gives it its state.
    """
    rank = _Rank(local, values, MemoryMeter(local.mesh.device))
    if optimizer is not None:
        rank.make_state(optimizer)
    return rank.run()


class _Rank:
    def __init__(self, local: LocalProgram, values: Mapping[str, Tensor], meter: MemoryMeter) -> None:
        self.local, self.meter = local, meter
        self.roles = [role for role in local.inputs if role.kind != "tangent"]
        self.pieces = {
            role.node: shard(values[role.node], local.input_layouts[role.node], local.mesh, local.coordinate)
            for role in self.roles
        }
        self.forward = stand_alone(local.forward)
        self.backward = None if local.backward is None else stand_alone(local.backward)
        for role in self.roles:
            meter.hold(f"{role.kind}s", [self.pieces[role.node]])
        for half in filter(None, (self.forward, self.backward)):
            constants = [getattr(half, str(node.target)) for node in half.graph.nodes if node.op == "get_attr"]
            meter.hold("buffers", [value for value in constants if isinstance(value, Tensor)])

    def make_state(self, make: MakeOptimizer) -> None:
        """Take a step, so that the optimizer has its state, and let the gradients go."""
        trained = [self.pieces[r.node] for r in self.roles if r.kind == "parameter" and r.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer = make(trained)
        optimizer.step()
        for parameter in trained:
            parameter.grad = None
        self.optimizer = optimizer
        self.meter.hold("optimizer", state_tensors(optimizer))

    def run(self) -> LiveBytes:
        """Run both halves with every tensor held by nobody but who needs it."""
        with torch.no_grad(), self.meter:
            outputs, saved = self.run_forward()
            kept = [saved[position] for position in kept_positions(self.local)]
            self.meter.hold("saved", saved)
            self.meter.hold("outputs", outputs)
            gradients = [] if self.backward is None else self.run_backward(saved)
        self.meter.hold("gradients", gradients)
        del kept
        return self.meter.result()

    def run_forward(self) -> tuple[list[Tensor], list[Tensor]]:
        updated = {role.of for role in self.local.outputs if role.kind == "buffer"}
        feeds = [self.pieces[r.node].clone() if r.node in updated else self.pieces[r.node] for r in self.roles]
        values = list(self.forward(list(feeds)))
        count = len(values) - self.local.num_saved
        returned = [role.kind for role in self.local.outputs if role.kind != "gradient" and role.node is not None]
        return [value for value, kind in zip(values[:count], returned) if kind == "output"], values[count:]

    def run_backward(self, saved: list[Tensor]) -> list[Tensor]:
        assert self.local.backward is not None and self.backward is not None
        placeholders = [node for node in self.local.backward.graph.nodes if node.op == "placeholder"]
        forms = [node.meta["val"] for node in placeholders[self.local.num_saved :]]
        tangents = [torch.ones(form.shape, dtype=form.dtype) for form in forms]
        own, arguments = Owned([*saved, *tangents]), [*saved, *tangents]
        saved.clear()
        values: list[Any] = list(self.backward(arguments))
        for position, value in enumerate(values):
            values[position] = None
            values[position] = own.take(value)
            del value
        return values


def stand_alone(half: fx.GraphModule) -> fx.GraphModule:
    """Return a copy that runs without other ranks and takes its arguments in a list."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(half.graph, {}))
    flatten_buckets(graph)
    stand_ins = _stand_ins()
    for node in graph.nodes:
        if node.op == "call_function" and node.target in stand_ins:
            node.target = stand_ins[node.target]
    return fx.GraphModule(half, take_arguments_in_a_list(graph))


def _all_gather(tensor: Tensor, size: int, group: str) -> Tensor:
    return torch.cat([tensor] * size)


def _all_reduce(tensor: Tensor, op: str, group: str) -> Tensor:
    return tensor.clone()


def _reduce_scatter(tensor: Tensor, op: str, size: int, group: str) -> Tensor:
    return tensor[: tensor.shape[0] // size].clone()


def _all_to_all(tensor: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
    return torch.cat([tensor[:1]] * sum(received))


_BY_KIND: dict[str, Callable[..., Tensor]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def _stay(handed: Any, *args: Any) -> Any:
    return handed


def _stand_ins() -> dict[Any, Callable[..., Any]]:
    """Return what runs in place of every collective; what is handed in is held until the wait, as a process does."""
    held: dict[int, Tensor] = {}

    def alone(kind: str) -> Callable[..., Tensor]:
        def run(tensor: Tensor, *args: Any) -> Tensor:
            result = _BY_KIND[kind](tensor, *args)
            if kind != "all_reduce":  # it works on a copy
                held[result.untyped_storage()._cdata] = tensor
            return result

        return run

    def wait(tensor: Tensor) -> Tensor:
        held.pop(tensor.untyped_storage()._cdata, None)
        return tensor

    return {
        **{op: alone(kind) for op, kind in COLLECTIVES.items()},
        **dict.fromkeys(IN_PLACE.values(), _stay),
        WAIT: wait,
    }


def _running(op: Any) -> str:
    """Return the name of the node whose line of generated code runs, or of the op where no graph runs."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith("<eval_with_key>"):
            line = linecache.getline(name, frame.f_lineno, frame.f_globals)
            return line.partition("=")[0].partition(":")[0].strip() or str(op)
        frame = frame.f_back  # type: ignore[assignment]
    return str(op)
