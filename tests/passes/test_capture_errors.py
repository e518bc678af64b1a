"""Each refusal of capture names the user's own line, what was found and what to do."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import autopar
from autopar.errors import CaptureError
from autopar.passes.capture import capture


class Lambda(nn.Module):
    """A module of one function and one square layer."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.gate = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.ones(4))
        self.function = function

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return self.function(self, x * scale)


def refused(function: Any, *args: Any, **kwargs: Any) -> str:
    """Return the message with which capture refuses a function."""
    with pytest.raises(CaptureError) as error:
        capture(Lambda(function), args or (torch.randn(3, 4),), kwargs)
    return str(error.value)


def branch(module: Any, x: Tensor) -> Tensor:
    if module.layer(x).sum() > 0:  # the line
        return x
    return -module.layer(x)


def item(module: Any, x: Tensor) -> Tensor:
    count = int(x.max().item())  # the line
    return module.layer(x) * count


def tolist(module: Any, x: Tensor) -> Tensor:
    return module.layer(x) * x[0].tolist()[0]  # the line


def nonzero(module: Any, x: Tensor) -> Tensor:
    y = module.layer(x)
    return y[y > 0].sum()  # the line


@pytest.mark.parametrize("function", [branch, item, tolist, nonzero], ids=lambda f: f.__name__)
def test_data_dependent(function: Any) -> None:
    """A branch on data, a value read, or a shape that depends on data: the user's line and a way out."""
    message = refused(function)
    lines, first = inspect.getsourcelines(function)
    number = first + next(i for i, line in enumerate(lines) if "# the line" in line)
    assert f"{__file__}:{number}: " in message
    assert "needs the value of a tensor" in message and "torch.where" in message


def test_constant_branch_is_fine() -> None:
    """Reading a value that depends on no input is allowed, and costs no node."""

    def run(module: Any, x: Tensor) -> Tensor:
        steps = torch.arange(4)
        scale = 2.0 if (steps[-1] == 3).all() else 100.0
        return (module.layer(x) * scale * int(steps.sum()) * torch.tensor([3.0]).item()).sum()

    program = capture(Lambda(run), (torch.randn(3, 4),))
    assert not any("arange" in str(node.target) for node in program.ops())
    assert any(2.0 in node.args for node in program.ops())


def test_arity() -> None:
    """Missing, extra or unknown arguments are refused with the signature."""
    assert re.search(r"inputs \(\) do not fit Lambda.forward.*missing.*'x'", _refused_call(()))
    assert "too many positional arguments" in _refused_call((torch.ones(4), 1.0, 2.0))
    assert "unexpected keyword argument 'nope'" in _refused_call((torch.ones(4),), nope=1)


def _refused_call(args: Any, **kwargs: Any) -> str:
    with pytest.raises(CaptureError) as error:
        capture(Lambda(lambda module, x: module.layer(x)), args, kwargs)
    return str(error.value)


def test_types() -> None:
    """A bare tensor instead of a tuple, numpy arrays, and what the model itself can't take."""
    assert "must be a tuple" in _refused_call(torch.ones(4)) and "(x,)" in _refused_call(torch.ones(4))
    message = _refused_call((Stateful(torch.ones(3)),))
    assert "args[0] is a Stateful, which holds tensors" in message and "Pass the tensors themselves" in message
    message = _refused_call((numpy.ones(4, dtype=numpy.float32),))
    assert "args[0] is a ndarray of numpy" in message and "torch.as_tensor" in message
    message = _refused_call((torch.ones(3, 4, dtype=torch.float64),))
    assert "test_capture_errors.py:" in message and "float64" in message and "Check that the model runs" in message
    message = refused(lambda module, x: torch.nn.functional.scaled_dot_product_attention(x, x.double(), x))
    assert "test_capture_errors.py:" in message and "same dtype" in message
    message = _refused_call((torch.ones(3, 5),))
    assert "two sizes" in message and "(3, 5)" in message
    assert "TypeError" in _refused_call(("text",))


def test_devices() -> None:
    """Model and inputs on two devices are refused; meta goes with everything."""

    class Elsewhere(torch.Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("cuda")

    x = torch.ones(3, 4).as_subclass(Elsewhere)
    message = _refused_call((x,))
    assert "parameter gate is on cpu; input args[0] is on cuda" in message and ".to(device)" in message
    capture(Lambda(lambda module, x: module.layer(x)), (torch.ones(3, 4, device="meta"),))


def test_write_into_input_or_parameter() -> None:
    """A model that writes into a parameter, or into an input whose gradient would change, is refused."""

    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x.add_(self.weight).sum()

    with pytest.raises(CaptureError, match=r"writes into its input args\[0\], which wants a gradient"):
        capture(Direct(), (torch.ones(3),))

    def into_parameter(module: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            module.layer.weight.clamp_(-1.0, 1.0)
        return module.layer(x).sum()

    message = refused(into_parameter)
    assert "writes into its parameter layer.weight" in message and "buffer" in message


def test_outputs_that_hide_tensors() -> None:
    """An object with tensors in it, such as a cache, is refused; one without is a constant."""

    class Cache:
        def __init__(self, *layers: Any) -> None:
            self.layers = [{"keys": layer} for layer in layers]

    message = refused(lambda module, x: {"loss": module.layer(x).sum(), "cache": Cache(x)})
    assert "output ['cache'] is a Cache, which holds tensors" in message and "use_cache=False" in message
    empty = Cache(1, "two")
    program = capture(Lambda(lambda module, x: (module.layer(x).sum(), empty)), (torch.randn(3, 4),))
    assert program.outputs[1].constant is empty


class Stateful(nn.Module):
    """A module with a tensor that is neither parameter nor buffer."""

    def __init__(self, step: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.steps = torch.zeros(4)
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        self.step(self)
        return (self.layer(x) * self.steps).sum()


def test_state_that_is_no_buffer() -> None:
    """A plain tensor that is written to would be burnt in: refused, and untouched."""

    def in_place(module: Any) -> None:
        module.steps.add_(1)

    def augmented(module: Any) -> None:
        module.steps += 1

    def replaced(module: Any) -> None:
        module.steps = module.steps + 1

    for step in (in_place, augmented, replaced):
        model = Stateful(step)
        with pytest.raises(CaptureError, match=r"attribute steps, a tensor that is neither .* register_buffer"):
            capture(model, (torch.randn(3, 4),))
        assert model.steps.tolist() == [0.0] * 4


def test_plain_tensor_that_is_only_read_or_filled() -> None:
    """A plain tensor that is only read is a constant; one that is made anew is a cache."""
    program = capture(Stateful(lambda module: None), (torch.randn(3, 4),))
    (constant,) = [node for node in program.ops() if node.op == "get_attr"]
    assert constant.meta["val"].shape == (4,)
    assert torch.equal(getattr(program.graph_module, constant.target), torch.zeros(4))

    def refill(module: Any) -> None:
        module.steps = torch.ones(4)

    assert not [node for node in capture(Stateful(refill), (torch.randn(3, 4),)).ops() if node.op == "get_attr"]


def test_parameter_reached_past_its_module() -> None:
    """A parameter that the model reads from a closure would be a constant: refused, with its name."""
    model = Lambda(None)
    kept = [model.layer.weight]
    model.function = lambda module, x: (x @ kept[0]).sum()
    with pytest.raises(CaptureError, match=r"layer.weight was reached past its module at .*test_capture_errors.py"):
        capture(model, (torch.randn(3, 4),))


def test_lost_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that autograd loses is refused, not taken for zero."""
    grad = torch.autograd.grad

    def lossy(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> list[Tensor | None]:
        return [None, *grad(outputs, inputs, *args, **kwargs)[1:]]

    monkeypatch.setattr(torch.autograd, "grad", lossy)
    message = refused(lambda module, x: (module.layer(x) * module.gate).sum())
    assert message.startswith("gate wants a gradient and reaches the output at ") and "detach" in message


def test_gradients_that_are_meant_to_be_missing() -> None:
    """What is detached, used without gradients, or has no gradient by a custom function, has none."""

    class OnlyFirst(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            return x * w

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad, None

    def run(module: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = module.gate * 2
        return (OnlyFirst.apply(module.layer(x), module.gate) * module.gate.detach() + shift).sum()

    program = capture(Lambda(run), (torch.randn(3, 4),))
    assert {role.name: role.node for role in program.outputs if role.kind == "gradient"}["gate"] is None


class DoubleAndCount(torch.autograd.Function):
    """Twice the input; the backward adds the gradient to a total."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Tensor) -> Tensor:
        ctx.total = total
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.total.add_(gradient.detach())
        return gradient * 2, None


def test_buffer_written_by_the_backward() -> None:
    """New values of buffers come from the forward; a write in the backward is refused by the buffer's name."""
    message = refused(lambda module, x: DoubleAndCount.apply(module.layer(x).sum(0), module.table).sum())
    assert "the buffer table is written to by the backward" in message and "in forward()" in message


def test_a_failure_without_a_line_of_the_model_names_its_module() -> None:
    """The line that calls autopar, or one of autopar's own, is no place in the model."""
    model = nn.Sequential(nn.ReLU(), nn.Linear(5, 3))
    with pytest.raises(CaptureError) as error:
        autopar.plan(model, (2,), torch.randn(3, 4))
    message = str(error.value)
    assert message.startswith("tracing the model failed in Linear '1': contract") and ".py" not in message
    with pytest.raises(CaptureError) as error:
        autopar.plan(nn.Linear(4, 3), (2,), (torch.randn(3, 4), torch.zeros(2, dtype=torch.int64)), loss=cross_entropy)
    message = str(error.value)
    assert ".py" not in message and ".." not in message and "batch_size" in message


def test_nodes_have_no_line_where_the_model_has_none() -> None:
    """A model of torch's own modules alone has no lines of its own."""
    program = capture(nn.Sequential(nn.Linear(4, 3)), (torch.randn(3, 4),))
    assert {node.meta.get("source", "") for node in program.graph.nodes} == {""}


def test_an_op_that_chooses_a_function_by_data() -> None:
    """What torch says of it, on twenty lines, is about torch; the model's line and a way out are told instead."""
    message = refused(
        lambda module, x: torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (module.layer(x),))
    )
    assert "test_capture_errors.py" in message and "torch.cond" in message and "torch.where" in message
    assert "dynamo" not in message.lower()


class Stale(nn.Module):
    """A module that works with what it computed from a parameter when it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.doubled = self.layer.weight * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ self.doubled


def test_attributes_with_a_history() -> None:
    """The gradient through such an attribute would be lost without a word."""
    with pytest.raises(CaptureError, match="reads its attribute doubled, which was computed from parameters before"):
        capture(Stale(), (torch.randn(3, 4),))


def test_embeddings_that_renormalize_themselves() -> None:
    """A parameter that the forward writes into is told apart from an input: a copy would not help."""
    with pytest.raises(
        CaptureError, match=r"writes into its parameter weight while it runs.*an Embedding with max_norm"
    ):
        capture(nn.Embedding(5, 4, max_norm=1.0), (torch.tensor([0, 3]),))
