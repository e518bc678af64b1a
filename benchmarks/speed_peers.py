"""What people write by hand: the same model under ``DistributedDataParallel``, FSDP2, DTensor and their pairs.

Each with its usual good settings, the global batch of the step benchmark, AdamW. Every peer computes what one device
computes: batch norms take the statistics of the whole batch (torch's ``SyncBatchNorm`` refuses tensors on the CPU, so
``GlobalBatchNorm`` stands in).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks.speed_cases import Case

DDP, FSDP2, FSDP2_KEPT, TENSOR, FSDP2_TENSOR = "DDP", "FSDP2", "FSDP2 kept", "TP", "FSDP2 x TP"
PEERS = (DDP, FSDP2, FSDP2_KEPT, TENSOR, FSDP2_TENSOR)
RECIPE_OF = {
    DDP: "DDP",
    FSDP2: "ZeRO-3",
    FSDP2_KEPT: "ZeRO-1/2",
    TENSOR: "Megatron",
    FSDP2_TENSOR: "FSDP x Megatron",
}
"""The same strategy, as ``recipes.py`` calls it."""


class NoRoom(Exception):
    """A peer that a case or a number of ranks has no room for."""


@dataclass
class Racer:
    """A model that trains.

    Attributes:
        title: its name in the table.
        module: what is called.
        inputs: what it is called with on this rank.
        optimizer: steps its parameters.
        group: ranks over which its loss is to be averaged; None where every rank has the loss of the global batch.
        extra_bytes: what it holds beside parameters, gradients, buffers and optimizer state.
        inside: what forward and backward run in.
    """

    title: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    optimizer: torch.optim.Optimizer
    group: dist.ProcessGroup | None = None
    extra_bytes: int = 0
    inside: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)

    def step(self) -> Tensor:
        """Train one step; return the loss that this rank saw."""
        with self.inside():
            loss: Tensor = self.module(*self.inputs)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def global_loss(self) -> float:
        """Train one step; return the loss of the global batch."""
        loss = self.step()
        if self.group is not None:
            loss = loss.clone()
            dist.all_reduce(loss, group=self.group)
            loss /= dist.get_world_size(self.group)
        return float(loss)


class _Normalise(torch.autograd.Function):
    """Batch norm with the statistics of all ranks: one all-reduce each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: GlobalBatchNorm) -> Tensor:
        dims = (0, 2, 3)
        sums = torch.stack((x.sum(dims), x.square().sum(dims)))
        dist.all_reduce(sums)
        count = x.numel() // x.shape[1] * dist.get_world_size()
        mean, square = sums / count
        variance = square - mean.square()
        assert norm.running_mean is not None and norm.running_var is not None and norm.momentum is not None
        norm.running_mean.lerp_(mean, norm.momentum)
        norm.running_var.lerp_(variance * (count / (count - 1)), norm.momentum)
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.count, ctx.eps = count, norm.eps
        return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, norm.eps, False)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, weight, mean, variance = ctx.saved_tensors
        scale = torch.rsqrt(variance + ctx.eps)
        dx, dw, db = torch.ops.aten.native_batch_norm_backward(
            gradient, x, weight, mean, variance, None, None, False, ctx.eps, (True, True, True)
        )
        sums = torch.stack((dw, db))
        dist.all_reduce(sums)
        dw_all, db_all = sums / ctx.count * (weight * scale)
        # dx - x * slope - offset, where slope * (x - mean) + db_all is what the statistics add.
        slope = dw_all * scale
        offset = db_all - slope * mean
        dx = dx.sub_(torch.addcmul(offset[:, None, None], x, slope[:, None, None]))
        return dx, dw, db, None


class GlobalBatchNorm(nn.BatchNorm2d):
    """``SyncBatchNorm`` for the CPU; in training only."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the input normalised over the batch of all ranks."""
        out: Tensor = _Normalise.apply(input, self.weight, self.bias, self)
        return out


def synchronise_norms(model: nn.Module) -> nn.Module:
    """Turn every batch norm into one of the whole batch, in place."""
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = GlobalBatchNorm
    return model


@dataclass(frozen=True)
class Setting:
    """What all racers share.

    Attributes:
        case: the model.
        ranks, rank: of the world.
        compiled: by ``torch.compile``.
        optimizer: makes it from parameters.
    """

    case: Case
    ranks: int
    rank: int
    compiled: bool
    optimizer: Callable[[Any], torch.optim.Optimizer]

    def share(self, parts: int, place: int) -> tuple[Tensor, ...]:
        """Return a share of the global batch."""
        if self.case.batch % parts:
            raise NoRoom(f"a batch of {self.case.batch} on {parts} ranks")
        return tuple(x.chunk(parts)[place].clone() for x in self.case.make_inputs())


def make_peer(title: str, setting: Setting) -> Racer:
    """Return a peer ready to run. Collective.

    Raises:
        NoRoom: the case or the number of ranks does not allow it.
    """
    build = {DDP: _ddp, FSDP2: _fsdp2, FSDP2_KEPT: _fsdp2_kept, TENSOR: _tensor, FSDP2_TENSOR: _fsdp2_tensor}
    return build[title](setting)


def make_plain(setting: Setting) -> Racer:
    """Return the model on one device, without anything."""
    model = setting.case.make_model()
    inputs = setting.case.make_inputs()
    return Racer("plain", _maybe_compiled(model, setting), inputs, setting.optimizer(model.parameters()))


def _maybe_compiled(model: nn.Module, setting: Setting) -> nn.Module:
    if setting.compiled:
        model.compile()
    return model


def _by_mesh(model: nn.Module) -> list[dict[str, Any]]:
    """Return groups of parameters whose optimizer can be fused: plain ones, and those of each mesh."""
    groups: dict[Any, list[Tensor]] = {}
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": parameters} for parameters in groups.values()]


def _blocks(model: nn.Module, case: Case) -> list[nn.Module]:
    return list(getattr(model, case.blocks))


def _ddp(setting: Setting) -> Racer:
    model = synchronise_norms(setting.case.make_model())
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    # Buffers are equal already: the statistics are those of all ranks.
    wrapped = DistributedDataParallel(
        _maybe_compiled(model, setting), gradient_as_bucket_view=True, forward_sync_buffers=False, static_graph=True
    )
    inputs = setting.share(setting.ranks, setting.rank)
    optimizer = setting.optimizer(model.parameters())
    return Racer(DDP, wrapped, inputs, optimizer, dist.group.WORLD, extra_bytes=num_bytes)


def _fsdp2(setting: Setting) -> Racer:
    mesh = init_device_mesh("cpu", (setting.ranks,))
    return _sharded(FSDP2, setting, synchronise_norms(setting.case.make_model()), mesh, kept=False)


def _fsdp2_kept(setting: Setting) -> Racer:
    mesh = init_device_mesh("cpu", (setting.ranks,))
    return _sharded(FSDP2_KEPT, setting, synchronise_norms(setting.case.make_model()), mesh, kept=True)


def _sharded(title: str, setting: Setting, model: nn.Module, mesh: DeviceMesh, kept: bool) -> Racer:
    for block in _blocks(model, setting.case):
        fully_shard(block, mesh=mesh, reshard_after_forward=not kept)
        _maybe_compiled(block, setting)
    fully_shard(model, mesh=mesh)
    inputs = setting.share(mesh.size(), mesh.get_local_rank())
    return Racer(title, model, inputs, setting.optimizer(_by_mesh(model)), mesh.get_group())


def _tensor(setting: Setting) -> Racer:
    mesh = init_device_mesh("cpu", (setting.ranks,))
    model, inside = _split_tensors(setting, mesh)
    for block in _blocks(model, setting.case):
        _maybe_compiled(block, setting)
    return Racer(TENSOR, model, setting.case.make_inputs(), setting.optimizer(_by_mesh(model)), inside=inside)


def _fsdp2_tensor(setting: Setting) -> Racer:
    if setting.ranks < 4 or setting.ranks % 2:
        raise NoRoom(f"two axes of {setting.ranks} ranks")
    mesh = init_device_mesh("cpu", (setting.ranks // 2, 2), mesh_dim_names=("data", "model"))
    model, inside = _split_tensors(setting, mesh["model"])
    racer = _sharded(FSDP2_TENSOR, setting, model, mesh["data"], kept=False)
    racer.inside = inside
    return racer


def _split_tensors(setting: Setting, mesh: DeviceMesh) -> tuple[nn.Module, Callable[[], AbstractContextManager[Any]]]:
    """Split pairs of products by columns and rows, embedding and head by the vocabulary."""
    case, model = setting.case, setting.case.make_model()
    parts = mesh.size()
    column, row = ColwiseParallel, RowwiseParallel
    family = case.name.partition("-")[0]
    if family == "mlp":
        layers = getattr(model, case.blocks)
        plan: dict[str, Any] = {str(i): row() if i % 2 else column() for i in range(len(layers) // 2 * 2)}
        parallelize_module(layers, mesh, plan)
        return model, nullcontext
    blocks = _blocks(model, case)
    if not hasattr(blocks[0], "attention"):
        raise NoRoom(f"tensor parallel of a {family}")
    for block in blocks:
        attention: Any = block.attention
        heads = attention.heads if hasattr(attention, "heads") else attention.config.kv_heads
        if heads % parts:
            raise NoRoom(f"{heads} heads on {parts} ranks")
        if hasattr(attention, "heads"):
            attention.heads //= parts
        names = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.up_proj", "mlp.gate_proj", "mlp.up")
        plan = {name: column() for name in names}
        plan |= {name: row() for name in ("attention.o_proj", "mlp.down_proj", "mlp.down")}
        known = dict(block.named_modules())
        parallelize_module(block, mesh, {name: style for name, style in plan.items() if name in known})
    if not case.tokens:
        return model, nullcontext
    outer: Any = model
    tied = outer.head.weight is outer.embedding.weight
    ends = {
        "embedding": row(input_layouts=Replicate()),
        "head": column(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    if tied:
        outer.head.weight = outer.embedding.weight
    return model, loss_parallel
