"""The configurations of a cluster: stages, schedule, micro-batches, and the shape of the mesh inside a stage."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from .hardware import Hardware
from .schedules import NAMES, SINGLE, SPLITS_BACKWARD

CHUNKS = (2, 4, 8)
"""Stages a rank that interleaved schedules try."""

MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Samples of a micro-batch that are tried, besides the whole batch of a data rank."""


@dataclass(frozen=True)
class Candidate:
    """One configuration.

    Attributes:
        stages: ranks of the pipeline axis.
        data: ranks of the data axis.
        inner: sizes of the other axes inside a stage.
        micro_batch: samples of a micro-batch on one data rank.
        micro_batches: of a step.
        schedule, chunks: its name and the stages of each rank.
    """

    stages: int
    data: int
    inner: tuple[int, ...]
    micro_batch: int
    micro_batches: int
    schedule: str = "1f1b"
    chunks: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of all axes: pipeline, data, inner."""
        return (self.stages, self.data, *self.inner)

    @property
    def num_actions(self) -> int:
        """Actions of its schedule's table."""
        parts = 3 if self.schedule in SPLITS_BACKWARD else 2
        return self.stages * self.chunks * self.micro_batches * parts

    def __str__(self) -> str:
        inner = " x ".join(map(str, self.inner)) or "1"
        name = NAMES[self.schedule] + (f" of {self.chunks}" if self.chunks > 1 else "")
        pipeline = f"{self.stages} stages ({name})" if self.stages > 1 else "no stages"
        return (
            f"{pipeline} x {self.data} data x {inner} inside, {self.micro_batches} micro-batches of {self.micro_batch}"
        )


@dataclass(frozen=True)
class Limits:
    """What a search may choose from; an empty tuple leaves it open.

    Attributes:
        stages, inner, micro_batch, micro_batches, schedules: allowed values; ``inner`` lists sizes of inner axes.
        pinned: regions that begin a stage.
        most_inside: ranks of a stage's inner axes at most, in those of a node.
    """

    stages: tuple[int, ...] = ()
    inner: tuple[tuple[int, ...], ...] = ()
    micro_batch: tuple[int, ...] = ()
    micro_batches: tuple[int, ...] = ()
    schedules: tuple[str, ...] = ()
    pinned: tuple[int, ...] = ()
    most_inside: int = 2


def candidates(hardware: Hardware, batch: int, num_regions: int, limits: Limits) -> Iterator[Candidate]:
    """Yield every candidate: factorisations of the cluster with every micro-batch and schedule that fits them."""
    total = hardware.num_ranks
    for stages in _divisors(total):
        if stages > num_regions or (limits.stages and stages not in limits.stages):
            continue
        for inner in _inner_shapes(total // stages, hardware, limits):
            data = total // stages // math.prod(inner)
            for micro_batch in _divisors(batch // data) if batch % data == 0 else ():
                if limits.micro_batch and micro_batch not in limits.micro_batch:
                    continue
                number = batch // data // micro_batch
                plain = stages == 1 and number == 1
                if not limits.micro_batch and not plain and micro_batch not in MICRO_BATCHES:
                    continue
                if limits.micro_batches and number not in limits.micro_batches:
                    continue
                for schedule, chunks in _schedules(stages, number, num_regions, limits):
                    yield Candidate(stages, data, inner, micro_batch, number, schedule, chunks)


def _divisors(number: int) -> list[int]:
    return [value for value in range(1, number + 1) if number % value == 0]


def _inner_shapes(ranks: int, hardware: Hardware, limits: Limits) -> list[tuple[int, ...]]:
    if limits.inner:
        return [inner for inner in limits.inner if ranks % math.prod(inner) == 0]
    per_node = hardware.devices_per_node
    whole = [size for size in _divisors(ranks) if size <= limits.most_inside * per_node]
    # Others would lie across the borders of nodes.
    return [(size,) if size > 1 else () for size in whole if per_node % size == 0 or size % per_node == 0]


def _schedules(stages: int, number: int, num_regions: int, limits: Limits) -> list[tuple[str, int]]:
    allowed = limits.schedules or ("1f1b", "gpipe", "zero_bubble", "interleaved_1f1b", "zbv")
    if stages == 1:
        return [("1f1b", 1)]
    if number == 1:
        allowed = tuple(name for name in allowed if name != "gpipe") or allowed
    out = [(name, 1) for name in allowed if name in (*SINGLE, "zero_bubble")]
    if "zbv" in allowed and 2 * stages <= num_regions:
        out.append(("zbv", 2))
    if "interleaved_1f1b" in allowed:
        out += [("interleaved_1f1b", chunks) for chunks in CHUNKS if chunks * stages <= num_regions]
    return out
