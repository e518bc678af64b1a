"""A transformer in stages by hand: ``torch.distributed.pipelining`` with 1F1B, and where autopar is asked to cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.models.transformer import Transformer
from benchmarks.speed_cases import Case
from benchmarks.speed_peers import NoRoom, Racer, Setting

PIPELINE = "1F1B"


class Stage(nn.Module):
    """Some layers of a transformer; the first stage has the embedding too, the last one the head."""

    def __init__(self, model: Transformer, place: int, stages: int) -> None:
        super().__init__()
        start, end = (cut(len(model.layers), at, stages) for at in (place, place + 1))
        self.causal, self.masked = model.config.causal, max(1, model.config.sequence * 5 // 32)
        self.embedding = model.embedding if place == 0 else None
        self.positions = model.positions if place == 0 else None
        self.layers = model.layers[start:end]
        self.norm = model.norm if place == stages - 1 else None
        self.head = model.head if place == stages - 1 else None
        self.register_buffer("cos", model.cos)
        self.register_buffer("sin", model.sin)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after these layers, or the logits."""
        if self.embedding is not None:
            x = self.embedding(x)
            if self.positions is not None:
                x = x + self.positions.weight
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        if self.head is None or self.norm is None:
            return x
        x = x if self.causal else x[:, : self.masked]
        logits: Tensor = self.head(self.norm(x))
        return logits.float()


@dataclass
class PipelineRacer(Racer):
    """A racer whose step is that of a schedule.

    Attributes:
        schedule: of this rank's stage.
        place: of the stage.
        tied: the head is the embedding; their gradients are summed over ``ends``.
        ends: the first and the last rank.
    """

    schedule: Any = None
    place: int = 0
    tied: bool = False
    ends: dist.ProcessGroup | None = None

    def step(self) -> Tensor:
        """Train one step; return the loss, on the last stage that of the global batch."""
        losses: list[Tensor] = []
        last = dist.get_world_size() - 1
        if self.place == 0:
            self.schedule.step(self.inputs[0])
        elif self.place == last:
            self.schedule.step(target=self.inputs[1], losses=losses)
        else:
            self.schedule.step()
        module: Any = self.module
        if self.tied and self.place in (0, last):
            dist.all_reduce((module.embedding or module.head).weight.grad, group=self.ends)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    def global_loss(self) -> float:
        """Train one step; return the loss of the global batch."""
        loss = self.step()
        dist.broadcast(loss, dist.get_world_size() - 1)
        return float(loss)


def cut(layers: int, place: int, stages: int) -> int:
    """Return the first layer of a stage."""
    return layers * place // stages


def cuts(case: Case, stages: int) -> tuple[str, ...]:
    """Return the modules at which autopar's stages start.

    Raises:
        NoRoom: the case has no stages.
    """
    if not case.tokens:
        raise NoRoom(f"stages of {case.name} by hand")
    layers = len(getattr(case.make_model(), case.blocks))
    if layers < stages:
        raise NoRoom(f"{layers} layers in {stages} stages")
    return tuple(f"{case.blocks}.{cut(layers, place, stages)}" for place in range(1, stages))


def micro_batches(case: Case, stages: int) -> int:
    """Return how many micro-batches both sides use: two a stage."""
    if case.batch % (2 * stages):
        raise NoRoom(f"a batch of {case.batch} in {2 * stages} parts")
    return 2 * stages


def make_pipeline(setting: Setting) -> Racer:
    """Return the peer ready to run. Collective.

    Raises:
        NoRoom: the case has no stages.
    """
    case, stages = setting.case, setting.ranks
    cuts(case, stages)
    model: Any = case.make_model()
    tied = model.head.weight is model.embedding.weight
    module = Stage(model, setting.rank, stages)
    ends = dist.new_group([0, stages - 1]) if tied else None
    if setting.compiled:
        module.compile()
    stage = PipelineStage(module, setting.rank, stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, micro_batches(case, stages), loss_fn=_loss)
    inputs = tuple(x if module.causal or i == 0 else x[:, : module.masked] for i, x in enumerate(case.make_inputs()))
    optimizer = setting.optimizer(module.parameters())
    return PipelineRacer(
        PIPELINE, module, inputs, optimizer, schedule=schedule, place=setting.rank, tied=tied, ends=ends
    )


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
