"""What the ranks of a pool run: autograd semantics, inputs, outputs and refusals. Every function returns plain data."""

from __future__ import annotations

import copy
import io
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

import autopar
from autopar.runtime import agree
from autopar.runtime.agree import gather_objects
from tests.processes.compare import build, gradients, loss_of, split, state, worst

Errors = dict[str, tuple[float, str]]


def refusal(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the class and message of the error that ``call`` raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


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


def inner_output(sizes: tuple[int, ...]) -> tuple[dict[str, str], tuple[str, str]]:
    """Return the kinds of the outputs beside a loss, and the refusal of a gradient that reaches one."""
    built = build("gpt2")
    parallel, _ = split(built, sizes)
    out = parallel(*built[1], **built[2])
    kinds = {"loss": type(out.loss).__name__, "logits": type(out.logits).__name__, "out": type(out).__name__}
    return kinds, refusal(lambda: (out.loss + out.logits.full_tensor().sum()).backward())


def wrong_calls(sizes: tuple[int, ...]) -> dict[str, tuple[str, str]]:
    """Make calls that differ between ranks, or are wrong on one; each must be refused everywhere, and the next work."""
    built = build("mlp")
    parallel, _ = split(built, sizes)
    x, y = built[1]
    odd = dist.get_rank() == dist.get_world_size() - 1
    found = {
        "shapes": refusal(lambda: parallel(x[:-1] if odd else x, y[:-1] if odd else y)),
        "contents": refusal(lambda: parallel(x + 1 if odd else x, y)),
        "type": refusal(lambda: parallel(object() if odd else x, y)),
        "device": refusal(lambda: parallel(x.to("meta") if odd else x, y)),
        "mode": refusal(lambda: parallel.train(not odd)(x, y)),
    }
    parallel.train()
    found["after"] = refusal(lambda: parallel(x, y))
    found["assign"] = refusal(lambda: parallel.load_state_dict(parallel.full_state_dict(), assign=True))
    found["part"] = refusal(lambda: parallel.up(x))
    return found


def wrong_setups(sizes: tuple[int, ...]) -> dict[str, tuple[str, str]]:
    """Set up wrongly, on all ranks or on one; each must be refused on every rank."""
    model, args, _ = build("mlp")
    world = dist.get_world_size()
    odd = dist.get_rank() == world - 1
    wide = nn.Linear(16, 33 if odd else 32)
    plain = nn.Sequential(nn.Linear(16, 16))
    empty = nn.Linear(16, 16, device="meta")
    x = args[0]
    go = autopar.parallelize
    return {
        "mesh too large": refusal(lambda: go(model, (2 * world,), args)),
        "mesh too small": refusal(lambda: go(model, (1,), args)),
        "memory": refusal(lambda: go(model, sizes, args, memory=float("nan"))),
        "memory on one": refusal(lambda: go(model, sizes, args, memory=-1 if odd else None)),
        "options differ": refusal(lambda: go(model, sizes, args, optimizer="sgd" if odd else "adamw")),
        "models differ": refusal(lambda: go(wide, sizes, (x,))),
        "no model on one": refusal(lambda: go(None if odd else plain, sizes, (x,))),  # type: ignore[arg-type]
        "meta": refusal(lambda: go(empty, sizes, (x,))),
        "capture on one": refusal(lambda: go(Branching(odd), sizes, (x,))),
        "constraint": refusal(lambda: go(plain, sizes, (x,), constraints={"nothing.like.it": "column"})),
        "after": refusal(lambda: go(plain, sizes, (x,))(x)),
    }


class Branching(nn.Module):
    """A module that can't be traced on some rank."""

    def __init__(self, branch: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        """Return another value by the data."""
        if self.branch and x.sum() > 0:
            return x
        return self.linear(x)


def plans(sizes: tuple[int, ...]) -> tuple[dict[str, tuple[str, str]], bool]:
    """Use saved plans, right and wrong; return the refusals, and whether a right one is taken as it is."""
    model, args, _ = build("mlp")
    folder = [tempfile.mkdtemp(prefix="autopar-plans-")]
    dist.broadcast_object_list(folder, 0)
    path = Path(folder[0])
    good = autopar.plan(model, sizes, args)
    other_mesh = autopar.plan(model, (dist.get_world_size() * 2,), args)
    other_inputs = autopar.plan(model, sizes, tuple(a[:4] for a in args))
    other_model = autopar.plan(nn.Sequential(nn.Linear(16, 4)), sizes, args[:1])
    if dist.get_rank() == 0:
        good.save(path / "good.json")
        text = (path / "good.json").read_bytes()
        (path / "cut.json").write_bytes(text[: len(text) // 2])
        (path / "newer.json").write_bytes(
            text.replace(b'"schema":1', b'"schema":99').replace(b'"schema": 1', b'"schema": 99')
        )
    dist.barrier()
    go = autopar.parallelize
    taken = go(model, sizes, args, plan=path / "good.json")
    found = {
        "cut": refusal(lambda: go(model, sizes, args, plan=path / "cut.json")),
        "newer": refusal(lambda: go(model, sizes, args, plan=path / "newer.json")),
        "missing": refusal(lambda: go(model, sizes, args, plan=os.fspath(path / "missing.json"))),
        "other mesh": refusal(lambda: go(model, sizes, args, plan=other_mesh)),
        "other inputs": refusal(lambda: go(model, sizes, args, plan=other_inputs)),
        "other model": refusal(lambda: go(model, sizes, args, plan=other_model)),
        "other meaning": refusal(lambda: go(model, sizes, args, plan=good, inputs="local")),
        "memory": refusal(lambda: go(model, sizes, args, plan=good, memory=100)),
        "constraints": refusal(lambda: go(model, sizes, args, plan=good, constraints={"up": "column"})),
        "kind": refusal(lambda: go(model, sizes, args, plan=3)),  # type: ignore[arg-type]
        "first call": refusal(lambda: go(model, sizes, plan=other_inputs)(*args)),
        "lazily": refusal(lambda: go(model, sizes, plan=good)(*args)),
    }
    return found, taken.plan.to_bytes() == good.to_bytes()


def stale_optimizer(sizes: tuple[int, ...]) -> tuple[str, str]:
    """Step an optimizer that was built before parallelize."""
    model, args, _ = build("mlp")
    optimizer = torch.optim.Adam(model.parameters())
    parallel = autopar.parallelize(model, sizes, args)
    parallel(*args).backward()
    return refusal(optimizer.step)


def part_of_the_world() -> tuple[str, str] | tuple[float, str]:
    """Run on two of four ranks; return the refusal on the others, the error of the loss on these."""
    model, args, _ = build("mlp")
    reference = copy.deepcopy(model)
    mesh = DeviceMesh("cpu", [1, 3])
    if dist.get_rank() in (1, 3):
        ours = autopar.parallelize(model, mesh, args)(*args).detach()
        torch.manual_seed(0)
        return worst({"loss": ours}, {"loss": reference(*args).detach()})
    return refusal(lambda: autopar.parallelize(model, mesh, args))


def descending_mesh() -> tuple[str, str]:
    """Give a mesh whose ranks do not ascend."""
    model, args, _ = build("mlp")
    mesh = DeviceMesh("cpu", [1, 0])
    return refusal(lambda: autopar.parallelize(model, mesh, args))


def first_rank_alone(sizes: tuple[int, ...]) -> tuple[int, tuple[str, str]]:
    """Save the state dict on the first rank only, then ask there only for the full one, with little patience."""
    built = build("mlp")
    parallel, _ = split(built, sizes)
    count, found = 0, ("nothing", "")
    if dist.get_rank() == 0:
        buffer = io.BytesIO()
        torch.save(parallel.state_dict(), buffer)
        count = buffer.tell()
        with mock.patch.object(agree, "PATIENCE", timedelta(seconds=1)):
            found = refusal(parallel.full_state_dict)
    return count, found


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
