"""What the ranks of a pool run to test pipelines. Every function returns plain data."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopar
from tests.processes.compare import Built, build, full, loss_of, worst

Errors = dict[str, tuple[float, str]]


def train(
    name: str, names: tuple[str, ...], sizes: tuple[int, ...], dropout: float, options: dict[str, Any]
) -> dict[str, Any]:
    """Train a few clipped steps both ways; return losses, norms, errors of the state, and what this rank keeps."""
    built = build(name, dropout)
    model, args, kwargs = built
    mesh = autopar.Mesh(sizes, names)
    parallel = autopar.parallelize(model, mesh, args, kwargs, **options)
    ours = _train(parallel, built)
    state = parallel.full_state_dict()
    kept = [key for key, _ in parallel.named_parameters()]
    out: dict[str, Any] = {"ours": ours, "kept": kept, "errors": {}}
    if dist.get_rank() == 0:
        reference = build(name, dropout)[0]
        out["expected"] = _train(reference, built)
        out["errors"] = {"state": worst(state, dict(reference.state_dict()))}
        out["all"] = [key for key, _ in reference.named_parameters()]
        out["keys"] = list(state) == list(reference.state_dict())
    return out


def _train(module: nn.Module, built: Built, steps: int = 3) -> list[tuple[float, float]]:
    _, args, kwargs = built
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    out = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(module(*args, **kwargs))
        loss.backward()
        if isinstance(module, autopar.runtime.parallel_module.ParallelModule):
            norm = module.clip_grad_norm_(0.5)
        else:
            norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        out.append((float(full(loss.detach())), float(norm)))
    return out


def modes_and_shapes() -> dict[str, Any]:
    """Return relative errors of: training, eval of another batch, training on, a state loaded back; on two stages."""
    model, args, kwargs = build("gpt2")
    reference = build("gpt2")[0] if dist.get_rank() == 0 else None
    parallel = autopar.parallelize(model, autopar.Mesh((2,), ("pp",)), args, kwargs, micro_batches=4)
    start = parallel.full_state_dict()
    smaller = {name: value[:3] for name, value in kwargs.items()}
    out = {"train": _loss(parallel, kwargs), "programs": []}
    parallel.eval()
    with torch.no_grad():
        out["eval"] = _loss(parallel, smaller, backward=False)
    parallel.train()
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1)
    optimizer.step()
    parallel.load_state_dict(start)
    out["again"] = _loss(parallel, kwargs)
    if reference is None:
        return out
    expected = {"train": _loss(reference, kwargs), "again": _loss(reference, kwargs)}
    with torch.no_grad():
        expected["eval"] = _loss(reference.eval(), smaller, backward=False)
    return {name: (out[name], expected[name]) for name in expected}


def _loss(module: nn.Module, kwargs: dict[str, Any], backward: bool = True) -> float:
    loss = loss_of(module(**kwargs))
    if backward:
        loss.backward()
    return float(full(loss.detach()))


class Skips(nn.Module):
    """Convolutions with skips over several stages, as in a U-Net; three outputs, one of infinite slope."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1, stride=2)
        self.middle = nn.Sigmoid()
        self.up2, self.up1 = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        first = self.down1(x).tanh()
        low = self.middle(self.down2(first))
        high = self.up2(low)
        return {"image": self.up1(torch.cat([high, first], 1)) + x, "low": low, "root": (low - low.detach()).sqrt()}


def skips(options: dict[str, Any]) -> dict[str, Any]:
    """Return errors of outputs and gradients, that of the input among them, of a model without a loss."""
    torch.manual_seed(4)
    model, x = Skips(), torch.randn(4, 2, 8, 8, requires_grad=True)
    mesh = autopar.Mesh((dist.get_world_size(),), ("pp",))
    parallel = autopar.parallelize(model, mesh, (x,), **options)
    out = parallel(x)
    (out["image"].pow(2).mean() + out["low"].sum()).backward()
    found = {"x": x.grad, "image": out["image"].detach(), "low": out["low"].detach()}
    try:
        out["low"].sum().backward()
        refused = ""
    except Exception as error:
        refused = str(error)
    own = {name: full(p.grad) for name, p in parallel.named_parameters() if p.numel()}
    x.grad = None
    expected = model(x)
    (expected["image"].pow(2).mean() + expected["low"].sum()).backward()
    reference = {"x": x.grad, "image": expected["image"].detach(), "low": expected["low"].detach()}
    grads = {name: p.grad for name, p in model.named_parameters() if name in own}
    return {
        "errors": {"outputs": worst(found, reference), "gradients": worst(own, grads)},
        "refused": refused,
        "kept": list(own),
    }


def on_cluster(name: str, text: str) -> dict[str, Any]:
    """Train a model on the mesh that a search of a cluster finds."""
    built = build(name)
    model, args, kwargs = built
    parallel = autopar.parallelize(model, text, args, kwargs)
    again = autopar.parallelize(build(name)[0], text, args, kwargs, plan=parallel.plan)
    assert again.plan.to_bytes() == parallel.plan.to_bytes()
    losses = [loss for loss, _ in _train(parallel, built)]
    expected = [loss for loss, _ in _train(build(name)[0], built)] if dist.get_rank() == 0 else []
    return {"losses": losses, "expected": expected, "considered": parallel.plan.search.considered}


def local_shares() -> dict[str, Any]:
    """Return losses of shares of the batch on a torch mesh of two stages by two replicas, and those of one process."""
    from torch.distributed.device_mesh import init_device_mesh

    model, (x, y), _ = build("mlp", 0.1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "data"))
    share = mesh.get_coordinate()[1]
    mine = tuple(value.chunk(2)[share] for value in (x, y))
    parallel = autopar.parallelize(model, mesh, mine, inputs="local", micro_batches=4)
    ours = _train(parallel, (model, mine, {}))
    expected = _train(build("mlp", 0.1)[0], (model, (x, y), {})) if dist.get_rank() == 0 else []
    return {"ours": ours, "expected": expected}


def chosen_axis(folder: str) -> dict[str, Any]:
    """Train on an axis that became the pipeline axis, and again by the saved plan on a torch mesh without links."""
    import warnings

    from torch.distributed.device_mesh import init_device_mesh

    built = build("stack", 0.1)
    model, args, _ = built
    mesh = autopar.Mesh((2, 2), ("node", "gpu"), "cpu", ("ethernet_10/8", "nvlink4"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallel = autopar.parallelize(model, mesh, args)
    record = parallel.plan.pipeline
    path = f"{folder}/plan.json"
    if dist.get_rank() == 0:
        parallel.plan.save(path)
    ours = _train(parallel, built)
    smaller = tuple(value[:64] for value in args)
    state = parallel.full_state_dict()
    again = _loss_of(parallel, smaller)
    names = [name for name, _ in parallel.named_parameters()]
    torch_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "gpu"))
    given = autopar.parallelize(build("stack", 0.1)[0], torch_mesh, args, plan=path)
    unnamed = autopar.parallelize(build("stack", 0.1)[0], init_device_mesh("cpu", (2, 2)), args, plan=path)
    out: dict[str, Any] = {"record": (record and record.name, record and record.ranks), "kept": names, "ours": ours}
    out["given"], out["unnamed"] = _train(given, built), _train(unnamed, built)
    out["second"] = (again, parallel.plan.pipeline and parallel.plan.pipeline.name)
    out["warned"] = [str(one.message) for one in caught if "pipeline axis" in str(one.message)]
    if dist.get_rank() == 0:
        reference = build("stack", 0.1)[0]
        out["expected"] = _train(reference, built)
        out["all"] = [name for name, _ in reference.named_parameters()]
        out["error"] = worst(state, dict(reference.state_dict()))
        out["second_expected"] = _loss_of(reference, smaller)
    return out


def _loss_of(module: nn.Module, args: tuple[torch.Tensor, ...]) -> float:
    with torch.no_grad():
        module.eval()
        loss = float(full(module(*args)))
        module.train()
    return loss
