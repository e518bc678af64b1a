"""Capture: an ordinary module and example inputs become a joint forward and backward graph with global shapes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopar.errors import AutoparError, CaptureError

from . import torch_private
from .check_repeats import check_repeats
from .check_trace import check_trace, constants_of
from .clean_graph import clean_graph
from .decompositions import decomposition_table
from .output_leaves import holds_tensors
from .preserve_model import PreservedModel
from .program import Input, Output, Program
from .python_state import KeptGenerators, PythonState
from .trace_joint import Joint, RawTrace
from .trace_recorder import raising_line, raising_module


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool | None = None,
    every_output: bool = False,
) -> Program:
    """Trace ``model`` on example inputs into a program; neither the model nor any data is touched.

    Args:
        model: any module, real or on the meta device.
        args: positional example inputs; tensors may be real, meta or fake, only their shapes and dtypes count.
        kwargs: example inputs by keyword.
        training: trace the backward too; by default when the module is in training mode and gradients are enabled.
        every_output: differentiate every output, also beside a loss.

    Raises:
        CaptureError: the inputs do not fit the model, or it can't be traced whole; the message names the user's line.
    """
    kwargs = dict(kwargs or {})
    _check_arguments(model, args, kwargs)
    leaves, in_spec = pytree.tree_flatten((tuple(args), kwargs))
    roles = [*_state_roles(model), *_input_roles(tuple(args), kwargs, leaves)]
    tensors = [tensor for _, tensor in roles]
    _check_devices(roles)
    if training is None:
        training = model.training and torch.is_grad_enabled()
    inputs = [role for role, _ in roles]
    wants = [training and role.requires_grad for role in inputs]
    names = [role.name for role in inputs]
    kinds: list[str] = [role.kind for role in inputs]

    def joint() -> Joint:
        return Joint(model, names, kinds, in_spec, leaves, wants, every_output)

    try:
        trace = _trace(joint, tensors)
    except CaptureError as first:
        # Many models look at values, or call a kernel of one device, only when they are not compiled.
        try:
            with torch_private.as_if_compiling():
                trace = _trace(joint, tensors)
        except CaptureError as second:
            # What only happens when compiled says nothing about the model as it runs.
            raise second if isinstance(second.__cause__, torch_private.DATA_DEPENDENT) else first from first.__cause__
    check_trace(trace, model, names)
    return _program(trace, inputs, wants, leaves, in_spec)


def _check_arguments(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    if not isinstance(args, (tuple, list)):
        raise CaptureError(
            f"example inputs must be a tuple of positional arguments, got {type(args).__name__}; "
            "for a single tensor write (x,)"
        )
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        given = ", ".join([*(type(a).__name__ for a in args), *(f"{k}={type(v).__name__}" for k, v in kwargs.items())])
        signature = inspect.signature(model.forward)
        raise CaptureError(
            f"the example inputs ({given}) do not fit {type(model).__name__}.forward{signature}: {error}. "
            "Pass the arguments that a call of the model takes."
        ) from None
    for path, leaf in _named_leaves(tuple(args), kwargs):
        if type(leaf).__module__.partition(".")[0] == "numpy":
            raise CaptureError(
                f"example input {path} is a {type(leaf).__name__} of numpy; autopar takes tensors: torch.as_tensor(...)"
            )
        if not isinstance(leaf, Tensor) and holds_tensors(leaf, depth=4):
            raise CaptureError(
                f"example input {path} is a {type(leaf).__name__}, which holds tensors that autopar can't see, so they "
                "would be constants. Pass the tensors themselves, in tuples, lists or dicts, or make the class known "
                "to torch.utils._pytree.register_pytree_node."
            )


def _named_leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return ``(path, leaf)`` of every input leaf in pytree's order; a path is ``args[0]`` or ``kwargs['x']``."""
    out = []
    for i, value in enumerate(args):
        out += _below(f"args[{i}]", value)
    for name, value in kwargs.items():
        out += _below(f"kwargs[{name!r}]", value)
    return out


def _below(path: str, value: Any) -> list[tuple[str, Any]]:
    children, spec = pytree.tree_flatten(value, is_leaf=lambda x: x is not value)
    if spec.is_leaf():
        return [(path, value)]
    keys = list(value) if isinstance(value, dict) else range(len(children))
    return [pair for key, child in zip(keys, children) for pair in _below(f"{path}[{key!r}]", child)]


def _state_roles(model: nn.Module) -> list[tuple[Input, Tensor]]:
    """Return a role for every parameter, then every buffer; tied ones share one role."""
    roles = []
    named: list[tuple[Any, str, Any]] = [
        ("parameter", "p_", model.named_parameters(remove_duplicate=False)),
        ("buffer", "b_", model.named_buffers(remove_duplicate=False)),
    ]
    for kind, prefix, tensors in named:
        names: dict[int, list[str]] = {}
        first: dict[int, Tensor] = {}
        for name, tensor in tensors:
            names.setdefault(id(tensor), []).append(name)
            first.setdefault(id(tensor), tensor)
        for key, tensor in first.items():
            name, *aliases = names[key]
            wants = kind == "parameter" and tensor.requires_grad
            role = Input(prefix + _identifier(name), kind, name, requires_grad=wants, aliases=tuple(aliases))
            roles.append((role, tensor))
    return roles


def _input_roles(args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> list[tuple[Input, Tensor]]:
    roles = []
    for index, (path, leaf) in enumerate(_named_leaves(args, kwargs)):
        assert leaf is leaves[index]
        if isinstance(leaf, Tensor):
            roles.append((Input(_identifier(path), "input", path, index, leaf.requires_grad), leaf))
    return roles


def _identifier(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_") or "root"


def _check_devices(roles: list[tuple[Input, Tensor]]) -> None:
    """Check that parameters, buffers and inputs lie on one device; meta goes with everything."""
    where: dict[str, str] = {}
    for role, tensor in roles:
        if tensor.device.type != "meta":
            where.setdefault(tensor.device.type, f"{role.kind} {role.name}")
    if len(where) > 1:
        found = "; ".join(f"{name} is on {device}" for device, name in where.items())
        raise CaptureError(
            f"the model and its example inputs must lie on one kind of device, but {found}. "
            "Move the model or the inputs with .to(device)."
        )


def _trace(make: Callable[[], Joint], tensors: list[Tensor]) -> RawTrace:
    """Run the joint function on fake CPU tensors; a failure becomes a CaptureError that names the user's line."""
    joint = make()
    with KeptGenerators(), _on_fakes(joint.model, tensors) as (fakes, model):
        state = PythonState(joint.model)
        joint.trace.graph_module = torch_private.trace_graph(joint, fakes, decomposition_table())
        changed, drawn = state.changed(), state.drawn()
    model.refuse_state(constants_of(joint.trace.graph_module))
    if changed or drawn:
        again = make()
        with _on_fakes(again.model, tensors) as (fakes, _):
            check_repeats(again, fakes, changed, drawn)
    return joint.trace


@contextmanager
def _on_fakes(module: nn.Module, tensors: list[Tensor]) -> Iterator[tuple[list[Tensor], PreservedModel]]:
    """Give fake CPU tensors like ``tensors``, with the model to be put back; failures become CaptureErrors."""
    elsewhere = torch.get_default_device().type != "cpu"
    on_cpu = torch.device("cpu") if elsewhere else nullcontext()
    model = PreservedModel(module)
    with model, on_cpu, torch_private.FakeTensorMode(allow_non_fake_inputs=True), torch_private.quiet():
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu") for t in tensors]
        try:
            yield fakes, model
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(_failure(error, module)) from error


def _failure(error: Exception, model: nn.Module) -> str:
    line = raising_line(error.__traceback__).rstrip(":")
    module = raising_module(error.__traceback__, model)
    if isinstance(error, torch_private.DATA_DEPENDENT):
        return (
            f"the model can't be captured whole: {line or 'a line of the model'} needs the value of a tensor "
            "(a branch on data, .item(), .tolist(), or an op whose result has a shape that depends on data), "
            "and a compiled program has none. Use torch.where or a mask instead, or compute the value outside of "
            "the model and pass it in as a number."
        )
    places = [f"in {module}" if module else "", f"at {line}" if line else ""]
    if torch_private.is_choice_of_functions(error):
        return (
            f"the model can't be captured whole{''.join(f' {place}' for place in places if place)}: an op that takes "
            "functions (torch.cond, while_loop, ...) decides by data what to run. Compute every branch and choose with "
            "torch.where, or decide outside of the model."
        )
    text = str(error).rstrip(". ")
    words = text if isinstance(error, AutoparError) else f"{type(error).__name__}: {text}"
    return (
        f"tracing the model failed{''.join(f' {place}' for place in places if place)}: {words}. "
        "Check that the model runs on the example inputs as they are."
    )


def _program(
    trace: RawTrace, inputs: list[Input], wants: list[bool], leaves: list[Any], in_spec: pytree.TreeSpec
) -> Program:
    """Put the cleaned graph and the roles together."""
    tangents = [
        Input(_identifier(f"tangent{trace.leaves[i][0]}"), "tangent", trace.leaves[i][0], i) for i in trace.tangents
    ]
    graph_module = clean_graph(trace.graph_module, [role.node for role in (*inputs, *tangents)])
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    roles = tuple(
        Input(node.name, role.kind, role.name, role.index, bool(want), role.aliases)
        for node, role, want in zip(
            placeholders, (*inputs, *tangents), (*wants, *(False for _ in tangents)), strict=True
        )
    )
    for node, role in zip(placeholders, roles):
        node.meta["phase"] = "backward" if role.kind == "tangent" else "forward"
    outputs, nodes = _outputs(trace, roles, graph_module)
    output_node = graph_module.graph.output_node()
    output_node.args = (tuple(nodes),)
    graph_module.recompile()
    constants = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
    return Program(
        graph_module, roles, tuple(outputs), in_spec, trace.out_spec, constants, trace.loss, bool(trace.tangents)
    )


def _outputs(
    trace: RawTrace, roles: tuple[Input, ...], graph_module: fx.GraphModule
) -> tuple[list[Output], list[fx.Node | None]]:
    """Return the output roles and what the graph returns for each: leaves, gradients, new values."""
    values: list[fx.Node] = list(graph_module.graph.output_node().args[0])  # type: ignore[arg-type]
    num_leaves = len(trace.tensor_leaves)
    leaf_values = dict(zip(trace.tensor_leaves, values))
    gradients = dict(zip(trace.gradients, values[num_leaves:]))
    buffers = dict(zip(trace.written, values[num_leaves + len(gradients) :]))
    outputs: list[Output] = []
    nodes: list[fx.Node | None] = []
    for i, (path, constant) in enumerate(trace.leaves):
        node = leaf_values.get(i)
        name = node.name if node else None
        seen = i in trace.differentiable
        outputs.append(Output("output", path, name, i, constant=constant, differentiable=seen))
        nodes.append(node)
    for i, role in enumerate(roles):
        if role.requires_grad:
            node = gradients.get(i)
            outputs.append(Output("gradient", role.name, node.name if node else None, of=role.node))
            nodes.append(node)
    for role in roles:
        if role.kind in ("buffer", "input") and role.name in buffers:
            node = buffers[role.name]
            outputs.append(Output("buffer", role.name, node.name, of=role.node))
            nodes.append(node)
    return outputs, nodes
