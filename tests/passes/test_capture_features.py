"""What ordinary modules do: buffers, tied, frozen and unused parameters, containers, dtypes, writes in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.passes.capture import capture
from autopar.passes.program import Program, check_program
from tests.captured import assert_same_step, run_eager, run_program


def compare(model: nn.Module, *args: Any, rtol: float = 1e-4, **kwargs: Any) -> Program:
    """Capture a model, compare a step with eager, return the program."""
    program = check_program(capture(model, args, kwargs))
    captured = run_program(program, model, args, kwargs)
    assert_same_step(captured, run_eager(program, model, args, kwargs), rtol=rtol)
    return program


def targets(program: Program) -> list[str]:
    """Return the names of the ops of a program."""
    return [str(node.target) for node in program.ops()]


class Lambda(nn.Module):
    """A module of one function and one square layer."""

    def __init__(self, function: Any, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(width, width)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.layer, *args, **kwargs)


def test_buffers() -> None:
    """A buffer that is written to, in place or by assignment, comes back as an output; one that is read does not."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("shift", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().sum(0)
            return (x * self.scale + self.shift + self.mean).sum()

    model = Counter()
    before = model.mean
    program = capture(model, (torch.randn(4, 3),))
    assert model.mean is before and int(model.steps) == 0
    assert [role.name for role in program.outputs if role.kind == "buffer"] == ["steps", "mean"]
    compare(model, torch.randn(4, 3))


def test_tied_parameters() -> None:
    """Tied parameters are one placeholder with aliases and one summed gradient."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 5)
            self.head = nn.Linear(5, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), ids.flatten())

    program = compare(Tied(), torch.randint(0, 7, (2, 3)))
    parameters = [role for role in program.inputs if role.kind == "parameter"]
    assert [(role.name, role.aliases) for role in parameters] == [("embed.weight", ("head.weight",))]
    assert sum(role.kind == "gradient" for role in program.outputs) == 1


def test_frozen_and_unused_parameters() -> None:
    """A frozen parameter has no gradient output; an unused one has an output without a node."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.frozen, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.used(x)).square().mean()

    program = compare(Partly(), torch.randn(3, 4))
    gradients = {role.name: role.node for role in program.outputs if role.kind == "gradient"}
    assert set(gradients) == {"used.weight", "used.bias", "unused.weight", "unused.bias"}
    assert [name for name, node in gradients.items() if node is None] == ["unused.weight", "unused.bias"]


def test_all_frozen_is_forward_only() -> None:
    """Without anything to differentiate there is no backward."""
    model = nn.Linear(3, 3).requires_grad_(False)
    program = compare(model, torch.randn(2, 3))
    assert not program.training and {role.kind for role in program.inputs} == {"parameter", "input"}


@dataclass
class Result:
    """A result that pytree does not know by itself."""

    loss: Tensor
    hidden: list[Tensor]
    count: int
    nothing: Any = None


def test_dataclass_output() -> None:
    """A dataclass comes back leaf by leaf; its ``loss`` is the loss; a number is a constant, None is no leaf."""

    def run(layer: nn.Module, x: Tensor) -> Result:
        hidden = layer(x)
        return Result(hidden.square().sum(), [hidden, hidden + 1], 3)

    program = capture(Lambda(run), (torch.randn(2, 6),))
    names = [(role.name, role.constant) for role in program.outputs if role.kind == "output"]
    assert names == [(".loss", None), (".hidden[0]", None), (".hidden[1]", None), (".count", 3)]
    assert program.loss == 0
    assert [role.index for role in program.inputs if role.kind == "tangent"] == [0]
    assert program.outputs[3].node is None


def test_outputs_without_loss_have_tangents() -> None:
    """Without a loss every differentiable output has a tangent, and integer outputs have none."""

    def run(layer: nn.Module, x: Tensor) -> dict[str, Any]:
        y = layer(x)
        return {"y": y, "pair": (y.argmax(-1), y.exp()), "x": x, "flag": None}

    program = compare(Lambda(run), torch.randn(2, 6))
    assert program.loss is None
    assert [role.name for role in program.inputs if role.kind == "tangent"] == ["['y']", "['pair'][1]"]


def test_loss_first_of_a_tuple() -> None:
    """A scalar that comes first in a tuple is the loss."""
    program = compare(Lambda(lambda layer, x: (layer(x).mean(), layer(x))), torch.randn(2, 6))
    assert program.loss == 0 and sum(role.kind == "tangent" for role in program.inputs) == 1


def test_inputs() -> None:
    """Inputs may want gradients, be integers, numbers or None, come by keyword and in containers."""

    def run(layer: nn.Module, x: Tensor, ids: Tensor, *, pair: dict[str, Any], scale: float, skip: None) -> Tensor:
        return (layer(x)[ids] * scale * pair["a"]).sum() + pair["b"]

    x = torch.randn(4, 6, requires_grad=True)
    kwargs = {"pair": {"b": 2.0, "a": torch.randn(6)}, "scale": 3, "skip": None}
    program = compare(Lambda(run), x, torch.tensor([0, 2]), **kwargs)
    names = [(role.name, role.requires_grad) for role in program.inputs if role.kind == "input"]
    assert names == [("args[0]", True), ("args[1]", False), ("kwargs['pair']['a']", False)]
    assert sorted(program.constant_inputs.values(), key=str) == [2.0, 3, None]


def test_outputs_that_are_one_tensor() -> None:
    """One tensor returned twice has two tangents; inputs, parameters, pieces and detached tensors may be returned."""

    def run(layer: nn.Module, x: Tensor) -> Any:
        y = layer(x)
        return y, y, layer.weight, x, [y.sum(), y[0]], y.detach()

    program = compare(Lambda(run), torch.randn(2, 6, requires_grad=True))
    tangents = [role.name for role in program.inputs if role.kind == "tangent"]
    assert tangents == ["[0]", "[1]", "[2]", "[3]", "[4][0]", "[4][1]"]


def test_same_input_twice() -> None:
    """One tensor passed twice keeps two placeholders."""
    x = torch.randn(2, 6)
    program = compare(Lambda(lambda layer, a, b: (layer(a) * b).sum()), x, x)
    assert sum(role.kind == "input" for role in program.inputs) == 2


def test_writes_in_place() -> None:
    """Writes into intermediate tensors and their views are traced as functional ops."""

    def run(layer: nn.Module, x: Tensor) -> Tensor:
        y = layer(x).clone()
        y[:, 0] = 1.0
        y[1:] *= 2.0
        y.view(-1)[3:5].add_(1.0)
        return y.relu_().square().sum()

    program = compare(Lambda(run), torch.randn(3, 6))
    assert not any("_." in name for name in targets(program))


def test_returned_views_of_what_was_written_to() -> None:
    """They are computed again after the last write, and belong to the forward all the same."""

    class Window(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.register_buffer("rows", torch.zeros(4, 6))

        def forward(self, x: Tensor) -> Any:
            y = self.layer(x).clone()
            y[:, 1] = 0.5
            table = torch.zeros(6, 6)
            self.rows = table[:4]
            table[1:3] += y.detach()[:2]
            return y, y[None, :, -1], y[:, ::2]

    compare(Window(), torch.randn(3, 6))


def test_grids() -> None:
    """A function of torch that hands itself over inside is traced once."""
    model = Lambda(
        lambda layer, x: [g * layer(x).sum() for g in torch.meshgrid(x[0], torch.arange(3.0), indexing="xy")]
    )
    compare(model, torch.randn(4, 6))


def test_conjugated_and_negated_views() -> None:
    """What torch only marks as conjugated or negated is so for every reader, views of memory too."""

    def function(layer: Any, x: Tensor) -> Any:
        z = torch.view_as_complex(layer(x).view(4, 3, 2))
        y = (z * z[:1].conj()).conj()
        return torch.view_as_real(y.resolve_conj()), y.imag, y.conj().imag, z.conj().abs()

    program = compare(Lambda(function), torch.randn(4, 6))
    assert not {"aten._conj.default", "aten._neg_view.default"} & set(targets(program))


def test_write_between_view_and_product() -> None:
    """A merged view is not looked through once it, its base or another view of either was written to."""

    def both(layer: nn.Module, x: Tensor) -> Tensor:
        y = layer(x)
        flat = y.transpose(0, 1).reshape(-1, 6)
        flat.mul_(2.0)
        again = (x + 1).view(-1, 6)
        again.add_(1.0)
        return (flat @ layer.weight + again @ layer.weight).sum() + y.sum()

    def base_of_a_copy(layer: nn.Module, x: Tensor) -> Tensor:
        y = layer(x).transpose(0, 1)
        flat = y.reshape(-1, 6)
        y[:].mul_(2.0)
        return (flat @ layer.weight).sum() + y.sum()

    def base_of_a_view(layer: nn.Module, x: Tensor) -> Tensor:
        y = layer(x)
        flat = y.reshape(-1, 6)
        y[:].mul_(2.0)
        return (flat @ layer.weight).sum() + y.sum()

    def view_back(layer: nn.Module, x: Tensor) -> Tensor:
        rows = layer(x).view(-1, 6) @ layer.weight
        back = rows.view(2, 3, 6)
        back.mul_(2.0)
        return (rows * rows).sum() + back.sum()

    def view_of_a_copy(layer: nn.Module, x: Tensor) -> Tensor:
        y = layer(x).transpose(0, 1)
        flat = y.reshape(-1, 6)
        flat[:].add_(1.0)
        return (flat @ layer.weight).sum() + y.sum()

    def view_back_of_a_copy(layer: nn.Module, x: Tensor) -> Tensor:
        y = layer(x).transpose(0, 1)
        flat = y.reshape(-1, 6)
        flat.view(3, 2, 6).mul_(2.0)
        return (flat * flat).sum() + y.sum()

    def view_back_of_merged_heads(layer: nn.Module, x: Tensor) -> Tensor:
        y = layer(x).view(2, 3, 2, 3).permute(1, 0, 3, 2)
        flat = y.reshape(6, 6)
        flat.view(3, 2, 6).mul_(2.0)
        return (flat @ layer.weight).sum() + y.sum()

    for run in (
        both,
        base_of_a_copy,
        base_of_a_view,
        view_back,
        view_of_a_copy,
        view_back_of_a_copy,
        view_back_of_merged_heads,
    ):
        compare(Lambda(run), torch.randn(2, 3, 6))


def test_default_device() -> None:
    """A default device does not reach into the trace."""

    def run(layer: nn.Module, x: Tensor) -> Tensor:
        return (layer(x) * torch.arange(6) * torch.ones(6)).sum()

    model, args = Lambda(run), (torch.randn(2, 6),)
    expected = capture(model, args).fingerprint()
    with torch.device("meta"):
        assert capture(model, args).fingerprint() == expected


def test_merged_view_is_looked_through() -> None:
    """Viewing to rows, a product, and viewing back leaves no view at all."""

    def run(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x.reshape(-1, 6)).view(2, 3, 6).sum()

    program = compare(Lambda(run), torch.randn(2, 3, 6))
    assert not [name for name in targets(program) if "view" in name or "reshape" in name]


def test_module_attributes_are_put_back() -> None:
    """What a model caches on itself while it is traced does not stay."""

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.cache: Tensor | None = None
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.cache = torch.arange(3.0)
            return (self.layer(x) * self.cache).sum()

    model = Caching()
    capture(model, (torch.randn(2, 3),))
    assert model.cache is None and model.calls == 0


def test_what_a_module_puts_into_its_containers_does_not_stay() -> None:
    """A hook that is registered at the first call, and a cache: after capture the call is the first one again."""

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.installed = False
            self.tables: dict[int, Tensor] = {}
            self.seen: list[Tensor] = []

        def forward(self, x: Tensor) -> Any:
            if not self.installed:
                self.layer.register_forward_hook(lambda module, args, result: self.seen.append(result))
                self.installed = True
            if len(x) not in self.tables:
                self.tables[len(x)] = torch.arange(6.0)
            y = self.layer(x) + self.tables[len(x)]
            seen = list(self.seen)
            self.seen.clear()
            return y, seen

    model = Watched()
    capture(model, (torch.randn(4, 6),))
    assert not model.installed and not model.tables and not model.layer._forward_hooks
    program = compare(model, torch.randn(4, 6))
    assert [role.name for role in program.outputs if role.kind == "output"] == ["[0]", "[1][0]"]
    assert len(model(torch.randn(4, 6))[1]) == 1


def test_shared_module_and_checkpoint() -> None:
    """A layer that is called twice sums its gradient; activation checkpointing changes no number."""
    from torch.utils.checkpoint import checkpoint

    def run(layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(lambda y: layer(layer(y)).tanh(), x, use_reentrant=False).sum()

    compare(Lambda(run), torch.randn(2, 6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    """Models in other dtypes keep them in gradients and outputs."""
    model = Lambda(lambda layer, x, y: F.cross_entropy(F.layer_norm(layer(x), (6,)).softmax(-1), y)).to(dtype)
    args = (torch.randn(4, 6, dtype=dtype), torch.randint(0, 6, (4,)))
    program = check_program(capture(model, args))
    one, two = run_program(program, model, args, {}), run_eager(program, model, args, {})
    assert all(gradient is not None and gradient.dtype == dtype for gradient in one.gradients.values())
    rough = dtype == torch.bfloat16
    assert_same_step(one, two, rtol=5e-2 if rough else 1e-7, atol=1e-2 if rough else 1e-9)


def test_autocast() -> None:
    """Under autocast products run in the lower dtype and gradients come back in the parameters' own."""

    def run(layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            q = layer(x)[None, None]
            q = F.scaled_dot_product_attention(q, q, q)[0, 0]
            return F.cross_entropy(q @ layer.weight, y)

    model, args = Lambda(run), (torch.randn(4, 6), torch.randint(0, 6, (4,)))
    program = check_program(capture(model, args))
    products = [node for node in program.ops() if str(node.target) == "autopar.contract.default"]
    assert all(node.meta["val"].dtype == torch.bfloat16 for node in products)
    one, two = run_program(program, model, args, {}), run_eager(program, model, args, {})
    assert one.gradients["layer.weight"].dtype == torch.float32  # type: ignore[union-attr]
    assert_same_step(one, two, rtol=5e-2, atol=2e-2)


@pytest.mark.parametrize("around", [False, True])
def test_autocast_of_another_device(around: bool) -> None:
    """Autocast of CUDA decides about the casts of a trace, also where the model switches it off or on itself."""

    def switch(on: bool) -> None:
        torch.set_autocast_enabled("cuda", on)

    def run(layer: nn.Module, x: Tensor) -> Tensor:
        y = layer(x)
        switch(not around)
        return y.float() @ layer.weight

    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        switch(around)
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            program = capture(Lambda(run), (torch.randn(2, 6),))
    finally:
        switch(False)
        torch.set_autocast_dtype("cuda", torch.float16)
    products = [node for node in program.ops() if str(node.target) == "autopar.contract.default"]
    wanted = [node.meta["val"].dtype == torch.bfloat16 for node in products if node.meta["phase"] == "forward"]
    assert wanted == [around, not around]


def test_no_grad_and_training_argument() -> None:
    """``torch.no_grad`` and ``training=False`` give a forward-only program, ``training=True`` a joint one."""
    model, args = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), (torch.randn(2, 3),)
    with torch.no_grad():
        assert not capture(model, args).training
    assert not capture(model, args, training=False).training
    model.eval()
    program = capture(model, args, training=True)
    assert program.training and "autopar.bernoulli.default" not in targets(program)
    assert not model.training


def test_torch_modules() -> None:
    """Modules of torch that are written on top of functions are seen through."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    program = compare(layer, torch.randn(2, 5, 8))
    assert "autopar.contract.default" in targets(program)
    compare(nn.Sequential(nn.Conv1d(4, 4, 3), nn.GroupNorm(2, 4), nn.AvgPool1d(2), nn.RMSNorm(3)), torch.randn(2, 4, 8))
    compare(nn.MultiheadAttention(8, 2, batch_first=True), *(torch.randn(2, 5, 8) for _ in range(3)))
    compare(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.LogSoftmax(0)), torch.randn(3, 4))
    normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    spectral = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    program = compare(nn.Sequential(normed, nn.ReLU(inplace=True), spectral), torch.randn(3, 4))
    assert [role.name.rsplit(".")[-1] for role in program.outputs if role.kind == "buffer"] == ["_u", "_v"]
    compare(nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.3, inplace=True)), torch.randn(6, 4))


def test_dropout_draws_in_memory_order() -> None:
    """Masks equal eager ones after ops that keep, drop or permute the order of elements in memory."""

    def run(layer: nn.Module, x: Tensor) -> Tensor:
        x = layer(x)
        x = F.dropout(x.transpose(0, 1), 0.5) + F.dropout(x, 0.5).transpose(0, 1)
        x = F.dropout(F.batch_norm(x.transpose(1, 2), None, None, training=True), 0.5)
        x = F.dropout(x.transpose(1, 2).softmax(-1), 0.5) * F.dropout1d(x.transpose(1, 2), 0.5)
        x = F.dropout(torch.einsum("abc,dc->bda", x, layer.weight), 0.5)
        return F.dropout(x[:1].expand(3, -1, -1), 0.5).cumsum(0) * F.group_norm(x, 2).mean()

    compare(Lambda(run), torch.randn(2, 4, 6))
