"""What the ranks of a pool run: wrong calls, set-ups and plans. Every function returns what was refused, and how."""

from __future__ import annotations

import copy
import io
import os
import tempfile
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.runtime import agree
from tests.processes.compare import build, refusal, split, worst


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
        "mesh of one kind": refusal(lambda: go(model, "foo" if odd else sizes, args)),
        "mesh on one": refusal(lambda: go(model, (2 * world,) if odd else sizes, args)),
        "meshes differ": refusal(lambda: go(model, (world, 1) if odd else sizes, args)),
        "names differ": refusal(lambda: go(model, autopar.Mesh(sizes, ("b" if odd else "a",)), args)),
        "memory": refusal(lambda: go(model, sizes, args, memory=float("nan"))),
        "memory on one": refusal(lambda: go(model, sizes, args, memory=-1 if odd else None)),
        "options differ": refusal(lambda: go(model, sizes, args, optimizer="sgd" if odd else "adamw")),
        "models differ": refusal(lambda: go(wide, sizes, (x,))),
        "examples differ": refusal(lambda: go(model, sizes, tuple(a[:4] for a in args) if odd else args)),
        "example on one": refusal(lambda: go(plain, sizes, None if odd else x)),
        "keywords on one": refusal(lambda: go(plain, sizes, {"input": x} if odd else x)),
        "twice": refusal(lambda: go(go(plain, sizes, x), sizes, x)),
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


def copying(sizes: tuple[int, ...]) -> list[tuple[str, str]]:
    """Copy and pickle a parallel module whole."""
    parallel, _ = split(build("mlp"), sizes)
    return [refusal(lambda: copy.deepcopy(parallel)), refusal(lambda: torch.save(parallel, io.BytesIO()))]
