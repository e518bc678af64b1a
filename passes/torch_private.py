"""The one place that imports private names of torch. A new torch release is this file's work and its test's."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch._decomp import get_decompositions
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch._refs import istft as istft_without_checks
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode, disable_functional_mode
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    track_tensor_tree,
)
from torch.fx.graph import _BoxedCodeGen
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim import optimizer as optimizer_hooks
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DATA_DEPENDENT",
    "PIPELINE_SCHEDULES",
    "FakeTensorMode",
    "FunctionalTensorMode",
    "OpOverload",
    "StorageWeakRef",
    "TorchDispatchMode",
    "as_constant",
    "as_if_compiling",
    "clear_saved_tensors",
    "constant_of",
    "current_backward_sequence",
    "get_decompositions",
    "graph_is_kept",
    "is_choice_of_functions",
    "is_real",
    "is_transforming",
    "istft_without_checks",
    "last_forward_sequence",
    "new_dtensor",
    "new_placeholder",
    "node_of",
    "outside_of_trace",
    "pipeline_order",
    "quiet",
    "register_module_forward_hook",
    "register_module_forward_pre_hook",
    "step_hooks",
    "suggest_memory_format",
    "swapped_tensors",
    "take_arguments_in_a_list",
    "trace_graph",
    "tracing_graph",
    "unwrap",
    "without_checkpoints",
    "without_tracing",
    "wrap",
]

DATA_DEPENDENT: tuple[type[BaseException], ...] = (DataDependentOutputException, DynamicOutputShapeException)
"""What torch raises when Python asks a fake tensor for a value."""


def is_choice_of_functions(error: BaseException) -> bool:
    """Tell whether an error is that of an op which takes functions and runs those that data choose (``torch.cond``)."""
    dynamo = sys.modules.get("torch._dynamo.exc")  # importing it takes seconds; whoever raises it has done so
    return dynamo is not None and isinstance(error, dynamo.UncapturedHigherOrderOpError)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from logging an op that fails on fake tensors; the error itself says it."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


class _PlainCheckpoint:
    """Stands for ``CheckpointFunction`` while a model is traced: runs the function once, like any other."""

    @staticmethod
    def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


@contextlib.contextmanager
def without_checkpoints() -> Iterator[None]:
    """Make activation checkpointing do nothing inside: what is computed again is a plan's choice, not the trace's."""
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    checkpoint_function = torch.utils.checkpoint.CheckpointFunction
    torch.utils.checkpoint.CheckpointFunction = _PlainCheckpoint  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        torch.utils.checkpoint.CheckpointFunction = checkpoint_function  # type: ignore[misc]
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)


@contextlib.contextmanager
def as_if_compiling() -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` true, which keeps models from looking at values."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def trace_graph(function: Any, arguments: list[Tensor], table: dict[OpOverload, Any]) -> fx.GraphModule:
    """Trace ``function`` on fake tensors into a graph of ATen ops, with the decompositions of ``table``."""
    tracer = make_fx(function, decomposition_table=table, _disable_torch_fn_metadata_mode=True)
    with FunctionalTensorMode(), without_whole_layers(), without_ordered_checks():
        return tracer(*arguments)


@contextlib.contextmanager
def without_ordered_checks() -> Iterator[None]:
    """Let checks of matrix functions be traced like any op; torch keeps them in order by tokens of its own."""
    holder = torch._library.simple_registry.singleton.find("aten::_linalg_check_errors").effect
    before = holder.effect
    holder.register(None)
    try:
        yield
    finally:
        holder.register(before)


@contextlib.contextmanager
def without_whole_layers() -> Iterator[None]:
    """Keep oneDNN from taking recurrent layers whole, which would hide their products."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextlib.contextmanager
def without_tracing() -> Iterator[None]:
    """Leave the traced graph alone: what runs inside stays outside of it."""
    with disable_functional_mode(), disable_proxy_modes_tracing():
        yield


def tracing_graph() -> fx.Graph:
    """Return the graph that is being traced."""
    mode = get_proxy_mode()
    assert mode is not None, "no graph is being traced"
    graph: fx.Graph = mode.tracer.graph
    return graph


def new_placeholder(name: str, value: Tensor) -> fx.Node:
    """Add a placeholder to the graph that is being traced; ``value`` stands for it from now on."""
    mode = get_proxy_mode()
    assert mode is not None, "no graph is being traced"
    proxy = mode.tracer.create_proxy("placeholder", name, (), {})
    track_tensor_tree(value, proxy, constant=None, tracer=mode.tracer)
    node: fx.Node = proxy.node
    return node


@contextlib.contextmanager
def outside_of_trace() -> Iterator[None]:
    """Compute for real inside: neither traced nor on fake tensors."""
    with without_tracing(), unset_fake_temporarily():
        yield


def node_of(value: Tensor) -> fx.Node | None:
    """Return the node that computes a traced tensor; None for a tensor that is not traced."""
    mode = get_proxy_mode()
    assert mode is not None, "no graph is being traced"
    found = get_proxy_slot(unwrap(value), mode.tracer, None)
    node: fx.Node | None = None if found is None else found.proxy.node
    return node


def is_real(value: Tensor) -> bool:
    """Tell whether a tensor has values: it is neither traced nor fake."""
    traced = isinstance(value, (FunctionalTensor, FakeTensor)) or torch._is_functional_tensor(value)
    return not traced and not value.is_meta


def as_constant(value: Tensor) -> Tensor:
    """Bring a tensor with values into the trace as a constant of the graph."""
    result: Tensor = torch.ops.aten.lift_fresh_copy.default(value)
    return result


def constant_of(target: str) -> Tensor | None:
    """Return the value of an attribute of the graph that is being traced; None if it is not known."""
    mode = get_proxy_mode()
    assert mode is not None, "no graph is being traced"
    value = getattr(getattr(mode.tracer, "root", None), target, None)
    value = value.constant if isinstance(value, FakeTensor) else value
    return value if isinstance(value, Tensor) else None


def wrap(value: Tensor) -> Tensor:
    """Wrap a tensor so that in-place ops on it are traced as functional ones."""
    return FunctionalTensor.to_functional(value)


def unwrap(value: Tensor) -> Tensor:
    """Return the traced tensor below ``wrap``, after all writes; a tensor that is not wrapped comes back as it is."""
    if isinstance(value, FunctionalTensor):
        return value.from_functional()
    if torch._is_functional_tensor(value):  # what torch took out of one itself, as its ``tolist`` does
        torch._sync(value)  # type: ignore[attr-defined]
        return torch._from_functional_tensor(value)
    return value


@contextlib.contextmanager
def swapped_tensors(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Put ``tensors`` in place of parameters and buffers, tied ones included; afterwards the dict holds new buffers."""
    with _reparametrize_module(module, tensors, tie_weights=True):
        for part in module.modules():
            if isinstance(part, nn.RNNBase):
                # It reads its weights from a list of its own.
                part._flat_weights = [getattr(part, name) for name in part._flat_weights_names]
        yield


def last_forward_sequence() -> int:
    """Return the sequence number of the last autograd node that was made."""
    return int(torch._C._autograd._get_sequence_nr()) - 1


def current_backward_sequence() -> int | None:
    """Return the sequence number of the autograd node whose backward runs now; None outside of a backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


PIPELINE_SCHEDULES: dict[str, str] = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}
"""Name of a pipeline schedule -> torch's class of it."""


def pipeline_order(name: str, num_ranks: int, chunks: int, num_micro_batches: int) -> list[list[tuple[int, str, int]]]:
    """Return torch's own table of a schedule: for every rank ``(stage, F | B | I | W, micro-batch)`` in order.

    The tables are made by methods that need no stage modules and no processes; only what they read is set here.
    In 2.13 the printed table of the last rank of 1F1B starts at micro-batch 1, while the loop that runs starts at 0:
    forwards are numbered here as they follow each other.

    Args:
        name: a key of ``PIPELINE_SCHEDULES``.
        num_ranks: along the pipeline axis.
        chunks: stages of each rank.
        num_micro_batches: a number that the class supports.
    """
    from torch.distributed.pipelining import schedules

    cls = getattr(schedules, PIPELINE_SCHEDULES[name])
    table = cls.__new__(cls)
    table._n_microbatches = num_micro_batches
    table._num_stages = table.num_stages = num_ranks * chunks
    table.pp_group_size, table.n_local_stages = num_ranks, chunks
    table.number_of_rounds = max(1, num_micro_batches // num_ranks)
    table.microbatches_per_round = num_micro_batches // table.number_of_rounds
    if name in ("gpipe", "1f1b"):
        order = table._get_pipeline_order()
    else:
        order = {rank: table._calculate_single_rank_operations(rank) for rank in range(num_ranks)}
    rows = [
        [
            (action.stage_index, action.computation_type.value, action.microbatch_index)
            for action in order[rank]
            if action is not None and action.is_compute_op
        ]
        for rank in range(num_ranks)
    ]
    if name == "1f1b":
        for row in rows:
            numbers = iter(range(num_micro_batches))
            row[:] = [(stage, kind, next(numbers) if kind == "F" else at) for stage, kind, at in row]
    return rows


def take_arguments_in_a_list(graph: fx.Graph) -> fx.Graph:
    """Make the code of a graph take one list of arguments, which it empties: nobody else holds what it frees."""
    graph.set_codegen(_BoxedCodeGen())
    return graph


def new_dtensor(local: Tensor, spec: Any) -> DTensor:
    """Return a DTensor outside autograd, below its constructor, which only adds two layers of decorators."""
    made: DTensor = Tensor._dtensor__new__(DTensor, local, spec, requires_grad=False)  # type: ignore[attr-defined]
    return made


def engine_will_run(node: Any) -> bool | None:
    """Tell, in a backward, whether autograd will run a node that accumulates; None inside ``torch.autograd.grad``."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError as error:
        if "autograd.grad" in str(error):
            return None
        raise


def clear_saved_tensors(ctx: Any) -> None:
    """Let an autograd function's backward, in which this is called, drop what it saved, unless the graph is kept."""
    ctx.maybe_clear_saved_tensors()


def is_transforming() -> bool:
    """Tell whether a transform of ``torch.func`` (vmap, grad, jvp, ...) runs now."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def graph_is_kept() -> bool:
    """Tell in a backward whether it may run a second time (``retain_graph``)."""
    kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return kept


def step_hooks(optimizer: optimizer_hooks.Optimizer) -> list[Any]:
    """Return the hooks that run in an optimizer's step: its own and those of all optimizers."""
    return [
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
        *optimizer_hooks._global_optimizer_pre_hooks.values(),
        *optimizer_hooks._global_optimizer_post_hooks.values(),
    ]


def compile_graph(module: fx.GraphModule, operands: list[Tensor]) -> Any:
    """Return what Inductor makes of a graph, for operands of these shapes, strides and dtypes; called with them."""
    import torch._inductor

    with torch.no_grad():
        return torch._inductor.compile(module, list(operands))
