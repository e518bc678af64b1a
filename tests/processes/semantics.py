"""What the ranks of a pool run: autograd semantics, inputs, outputs and refusals. Every function returns plain data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

import autopar
from autopar.runtime.agree import gather_objects
from tests.processes.compare import build, gradients, loss_of, refusal, split, state, worst

Errors = dict[str, tuple[float, str]]


def on_first(errors: Errors) -> Errors:
    """Return the errors on the first rank, whose reference is the right one, and nothing elsewhere."""
    return errors if dist.get_rank() == 0 else {}


class Mixed(nn.Module):
    """A tied table, a frozen layer, an unused parameter, buffers of both kinds; returns several outputs, no loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.linspace(0, 1, 8), persistent=False)

    def forward(self, ids: Tensor, scale: Tensor, *, power: int = 1) -> dict[str, Any]:
        """Return logits, hidden states and a count."""
        hidden = self.norm(self.frozen(self.table(ids)) + self.shift) * scale**power
        return {"logits": self.head(hidden), "hidden": hidden, "count": ids.sum(), "power": power}


def mixed_inputs() -> tuple[Tensor, Tensor]:
    """Return inputs of ``Mixed``; the second requires a gradient."""
    torch.manual_seed(3)
    return torch.randint(0, 11, (8,)), torch.randn(8, 8, requires_grad=True)


def outputs_and_gradients(sizes: tuple[int, ...], outputs: str) -> tuple[Errors, dict[str, Any]]:
    """Run ``Mixed`` with a loss outside; return errors and what must hold."""
    model = Mixed()
    reference = copy.deepcopy(model)
    ids, scale = mixed_inputs()
    parallel = autopar.parallelize(model, sizes, (ids, scale), {"power": 2}, outputs=outputs)
    ours = parallel(ids, scale, power=2)
    theirs_scale = scale.detach().clone().requires_grad_()
    theirs = reference(ids, theirs_scale, power=2)
    kinds = {name: type(ours[name]).__name__ for name in ours}
    for out in (ours, theirs):
        whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in out.items()}
        (whole["logits"].logsumexp(-1).sum() + whole["hidden"].square().sum()).backward()
    flat = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in ours.items() if k != "power"}
    errors = {
        "outputs": worst(
            {k: v.detach() for k, v in flat.items()}, {k: v.detach() for k, v in theirs.items() if k != "power"}
        ),
        "gradients": worst(gradients(parallel), gradients(reference)),
        "input gradient": worst({"scale": scale.grad}, {"scale": theirs_scale.grad}),
        "state": worst(state(parallel), state(reference)),
    }
    facts = {
        "kinds": kinds,
        "power": ours["power"],
        "tied": parallel.head.weight is parallel.table.weight,
        "frozen": [name for name, p in parallel.named_parameters() if not p.requires_grad],
        "unused": parallel.unused.grad is None,
        "buffers": sorted(name for name, b in parallel.named_buffers() if not isinstance(b, DTensor)),
        "keys": list(parallel.state_dict()) == list(reference.state_dict()),
    }
    return errors, facts


def autograd(name: str, sizes: tuple[int, ...], how: str) -> tuple[Errors, dict[str, Any]]:
    """Accumulate, scale, interleave and repeat backward calls; return errors by case and what must hold."""
    built = build(name)
    parallel, reference = split(built, sizes, how)
    _, args, kwargs = built

    def loss(module: nn.Module) -> Tensor:
        return loss_of(module(*args, **kwargs))

    def accumulate(module: nn.Module) -> None:
        loss(module).backward()
        (loss(module) * 3).backward()

    def interleave(module: nn.Module) -> None:
        first, second = loss(module), loss(module)
        first.backward()
        second.backward()

    def retain(module: nn.Module) -> None:
        value = loss(module)
        value.backward(retain_graph=True)
        value.backward()

    def subtract(module: nn.Module) -> None:
        (loss(module) * 2 - loss(module)).backward()

    errors: Errors = {}
    for case in (accumulate, interleave, retain, subtract):
        for module in (parallel, reference):
            module.zero_grad()
            case(module)
        errors[case.__name__] = worst(gradients(parallel), gradients(reference))
    value = loss(parallel)
    value.backward()
    facts = {"twice": refusal(value.backward)}
    parallel.zero_grad()
    value = loss(parallel)
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.mul_(1.5)
    facts["changed before backward"] = refusal(value.backward)
    return on_first(errors), facts


def clipping(name: str, sizes: tuple[int, ...], how: str) -> Errors:
    """Clip gradients in every way; return the errors of the norm and of the clipped gradients."""
    built = build(name)
    parallel, reference = split(built, sizes, how)
    errors: Errors = {}
    for kind in (2.0, 1.0, float("inf")):
        for foreach in (True, False, None):
            norms = []
            for module in (parallel, reference):
                module.zero_grad()
                loss_of(module(*built[1], **built[2])).backward()
                if module is parallel and foreach is None:
                    norm = parallel.clip_grad_norm_(0.01, norm_type=kind)
                else:
                    norm = clip_grad_norm_(module.parameters(), 0.01, norm_type=kind, foreach=foreach)
                norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            label = f"norm {kind} foreach {foreach}"
            errors[label] = worst({"norm": norms[0]}, {"norm": norms[1]})
            errors[f"{label} gradients"] = worst(gradients(parallel), gradients(reference))
    return on_first(errors)


def local_inputs(name: str, sizes: tuple[int, ...]) -> tuple[list[float], Errors]:
    """Give each place of the first axis its share of the batch; return the losses and the errors of the gradients."""
    built = build(name)
    model, args, kwargs = built
    reference = copy.deepcopy(model)
    place = autopar.Mesh(sizes).coordinate(dist.get_rank())[0]

    def share(value: Any) -> Any:
        return value.chunk(sizes[0])[place] if isinstance(value, Tensor) and value.dim() else value

    mine = tuple(share(a) for a in args), {key: share(value) for key, value in kwargs.items()}
    parallel = autopar.parallelize(model, sizes, *mine, inputs="local")
    ours, theirs = loss_of(parallel(*mine[0], **mine[1])), loss_of(reference(*args, **kwargs))
    ours.backward()
    theirs.backward()
    errors = {
        "loss": worst({"loss": ours.detach()}, {"loss": theirs.detach()}),
        "gradients": worst(gradients(parallel), gradients(reference)),
    }
    return gather_objects(dist.group.WORLD, float(ours.detach())), on_first(errors)  # type: ignore[arg-type]


def lazy(name: str, sizes: tuple[int, ...]) -> tuple[Errors, dict[str, Any]]:
    """Parallelize without an example, build the optimizer before the first call, train twice."""
    built = build(name)
    model, args, kwargs = built
    reference = copy.deepcopy(model)
    parallel = autopar.parallelize(model, sizes)
    before = refusal(lambda: parallel.plan)
    same = list(parallel.parameters())
    for module in (parallel, reference):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(module(*args, **kwargs)).backward()
            optimizer.step()
    kept = all(a is b for a, b in zip(same, parallel.parameters()))
    rests = all(parallel.plan.placements[n] == p.placements for n, p in parallel.named_parameters())  # type: ignore[attr-defined]
    loss = [loss_of(module(*args, **kwargs)).detach() for module in (parallel, reference)]
    return on_first({"loss": worst({"l": loss[0]}, {"l": loss[1]})}), {"before": before, "kept": kept, "rests": rests}


def with_loss(sizes: tuple[int, ...]) -> Errors:
    """Put a loss behind a plain module."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
    reference = copy.deepcopy(model)
    x, y = torch.randn(6, 8), torch.randint(0, 5, (6,))
    parallel = autopar.parallelize(model, sizes, (x, y), loss=F.cross_entropy)
    ours, theirs = parallel(x, y), F.cross_entropy(reference(x), y)
    ours.backward()
    theirs.backward()
    return {
        "loss": worst({"l": ours.detach()}, {"l": theirs.detach()}),
        "gradients": worst(gradients(parallel), gradients(reference)),
    }


def inner_output(sizes: tuple[int, ...]) -> dict[str, str]:
    """Return the kinds of the outputs beside a loss."""
    built = build("gpt2")
    parallel, _ = split(built, sizes)
    out = parallel(*built[1], **built[2])
    return {"loss": type(out.loss).__name__, "logits": type(out.logits).__name__, "out": type(out).__name__}


class Beside(nn.Module):
    """A loss, and beside it logits and what a head of its own makes; random numbers, and buffers that are updated."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        # A bias in front of a batch norm would have a gradient of rounding alone.
        self.first, self.norm = nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12)
        self.head, self.critic = nn.Linear(12, 5), nn.Linear(12, 1)
        self.register_buffer("shift", torch.ones(6))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return all three."""
        hidden = F.dropout(self.norm(self.first(x + self.shift)).relu(), 0.3, self.training)
        logits = self.head(hidden)
        return {"loss": F.cross_entropy(logits, y), "logits": logits, "value": self.critic(hidden)}


def beside_loss(sizes: tuple[int, ...], how: str) -> tuple[Errors, dict[str, Any]]:
    """Let gradients reach outputs beside the loss in some steps; return errors and what must hold."""
    torch.manual_seed(1)
    args = (torch.randn(8, 6), torch.randint(0, 5, (8,)))
    parallel, reference = split((Beside(), args, {}), sizes, how)
    errors: Errors = {}
    facts: dict[str, Any] = {"none": []}
    steps = ((), ("logits", "value"), (), ("value",))
    for number, names in enumerate(steps):
        for module in (parallel, reference):
            module.zero_grad()
            torch.manual_seed(number)
            out = module(*args)
            after = torch.get_rng_state()
            whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in out.items()}
            if number == 3:
                whole["loss"].backward(retain_graph=True)
            terms = [whole[name].square().mean() for name in names]
            torch.stack([*([whole["loss"]] if number != 3 else []), *terms]).sum().backward()
            facts[f"generator {number}"] = torch.equal(after, torch.get_rng_state())
        errors[f"gradients {number}"] = worst(gradients(parallel), gradients(reference))
        errors[f"buffers {number}"] = worst(dict(parallel.named_buffers()), dict(reference.named_buffers()))
        facts["none"].append([m.critic.weight.grad is None for m in (parallel, reference)])  # type: ignore[union-attr]
    fresh, _ = split((Beside(), args, {}), sizes)
    value = fresh(*args)["value"].full_tensor().sum()
    fresh.get_buffer("shift").add_(1)
    facts["changed"] = refusal(value.backward)
    return on_first(errors), facts


class Shifts(nn.Module):
    """A model that writes into an input, twice the rows of which it reads before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """Return a loss."""
        loss = (self.layer(x) * seen.exp()).square().mean()
        seen.mul_(0.5).add_(x)
        return loss


def written_input(sizes: tuple[int, ...], inputs: str) -> list[Errors]:
    """Let a model write into an input, whole or this rank's share of it; return the errors after two steps."""
    torch.manual_seed(2)
    x, seen = torch.randn(8, 6), torch.randn(8, 6)
    share = slice(None) if inputs == "global" else slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    ours, theirs = seen[share].clone(), seen.clone()
    parallel, reference = split((Shifts(), (x[share], ours), {}), sizes, inputs=inputs)
    for _ in range(2):
        parallel(x[share], ours).backward()
        reference(x, theirs).backward()
    return [
        {"input": worst({"seen": ours}, {"seen": theirs[share]})},
        on_first({"gradients": worst(gradients(parallel), gradients(reference))}),
    ]


def stale_optimizer(sizes: tuple[int, ...]) -> tuple[str, str]:
    """Step an optimizer that was built before parallelize."""
    model, args, _ = build("mlp")
    optimizer = torch.optim.Adam(model.parameters())
    parallel = autopar.parallelize(model, sizes, args)
    parallel(*args).backward()
    return refusal(optimizer.step)


class Constant(nn.Module):
    """A module with a tensor that is neither a parameter nor a buffer, different on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factor = torch.full((4,), 2.0 + dist.get_rank())

    def forward(self, x: Tensor) -> Tensor:
        """Return a scaled projection."""
        return self.linear(x) * self.factor


def constants(sizes: tuple[int, ...]) -> list[float]:
    """Return what a module with a constant computes."""
    model = Constant()
    with torch.no_grad():
        model.linear.weight.fill_(1.0)
        model.linear.bias.zero_()
    x = torch.ones(4, 4)
    return [float(value) for value in autopar.parallelize(model, sizes, x)(x).detach().unique()]


def constrained(sizes: tuple[int, ...]) -> tuple[Errors, dict[str, str]]:
    """Split a pair of layers by column and row; run two shapes; return errors and where the weights rest."""
    built = build("mlp")
    parallel, reference = split(built, sizes, constraints={"up": "column", "down": "row"})
    errors: Errors = {}
    for batch in (8, 4):
        args = tuple(a[:batch] for a in built[1])
        for module in (parallel, reference):
            module.zero_grad()
            module(*args).backward()
        errors[str(batch)] = worst(gradients(parallel), gradients(reference))
    rests = {name: str(p.placements) for name, p in parallel.named_parameters()}  # type: ignore[attr-defined]
    return on_first(errors), rests


def every_output(sizes: tuple[int, ...]) -> Errors:
    """Let gradients reach the loss and the logits of a module that returns both."""
    built = build("gpt2")
    parallel, reference = split(built, sizes, outputs="full")
    for module in (parallel, reference):
        out = module(*built[1], **built[2])
        (out.loss * 2 + out.logits.square().mean()).backward()
    return on_first({"gradients": worst(gradients(parallel), gradients(reference))})


def random_state(sizes: tuple[int, ...], inputs: str) -> tuple[bool, list[int]]:
    """Call a module with dropout from different seeds; tell whether the own state survived, and what comes next."""
    model, args, _ = build("mlp", 0.5)
    parallel = autopar.parallelize(model, sizes, args, inputs=inputs)
    torch.manual_seed(dist.get_rank())
    before = torch.get_rng_state()
    parallel(*args)
    kept = torch.equal(before, torch.get_rng_state())
    return kept, torch.randint(0, 1 << 30, (4,)).tolist()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, fused=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, foreach=False, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, eps=1e-3),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01, eps=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, eps=1e-3),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01, eps=1e-3),
}


def optimizers(sizes: tuple[int, ...]) -> Errors:
    """Take three steps of every optimizer with the weights split by column and row; return the errors of the state."""
    errors: Errors = {}
    for label, make in OPTIMIZERS.items():
        built = build("mlp")
        parallel, reference = split(built, sizes, constraints={"up": "column", "down": "row"})
        for module in (parallel, reference):
            optimizer = make(module.parameters())
            for _ in range(3):
                optimizer.zero_grad()
                module(*built[1]).backward()
                optimizer.step()
        errors[label] = worst(state(parallel), state(reference))
    return on_first(errors)
