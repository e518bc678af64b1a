"""Regions and the variants to run them, and what stages made of them cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..simulate_schedule import StageCost


@dataclass(frozen=True)
class Variant:
    """One way to run a region on the mesh inside a stage: what it costs on one rank.

    Attributes:
        name: what it does (``zero1``, ``zero3 + recompute``, ...).
        forward_s, input_s, weight_s: seconds of one micro-batch: forward, backward for inputs, backward for weights.
        step_s: seconds once a step: gradients reduced, parameters updated and gathered.
        state_bytes: parameters, gradients, optimizer state.
        saved_bytes: kept for the backward of one micro-batch.
        working_bytes: needed besides while the region works, such as what it computes again.
    """

    name: str
    forward_s: float
    input_s: float
    weight_s: float = 0.0
    step_s: float = 0.0
    state_bytes: int = 0
    saved_bytes: int = 0
    working_bytes: int = 0

    def step_seconds(self, num_micro_batches: int) -> float:
        """Return the seconds of a step of so many micro-batches."""
        return num_micro_batches * (self.forward_s + self.input_s + self.weight_s) + self.step_s


@dataclass(frozen=True)
class Region:
    """A part of the model that is never cut: an embedding, a layer, a head.

    Attributes:
        name: module path or what people call it.
        variants: the ways to run it.
        send_s: seconds of sending everything that crosses a cut right behind it, by one rank to its peer.
    """

    name: str
    variants: tuple[Variant, ...]
    send_s: float = 0.0

    def fastest(self, num_micro_batches: int) -> int:
        """Return the variant with the least seconds of a step."""
        return min(range(len(self.variants)), key=lambda number: self.variants[number].step_seconds(num_micro_batches))


def crossing_bytes(num_regions: int, tensors: Sequence[tuple[int, int, int]]) -> tuple[int, ...]:
    """Return the bytes that cross a cut behind each region but the last.

    Args:
        num_regions: in model order.
        tensors: ``(region that makes it, last region that reads it, bytes)``; one that skips regions crosses every cut
            between.

    >>> crossing_bytes(3, [(0, 1, 10), (0, 2, 5), (1, 2, 7)])
    (15, 12)
    """
    return tuple(
        sum(size for made, read, size in tensors if made <= region < read) for region in range(num_regions - 1)
    )


def stage_costs(regions: Sequence[Region], firsts: Sequence[int], variants: Sequence[int]) -> tuple[StageCost, ...]:
    """Return what the stages cost that begin at the regions ``firsts`` and run every region by its variant."""
    out = []
    for first, end in zip(firsts, [*firsts[1:], len(regions)], strict=True):
        chosen = [regions[at].variants[variants[at]] for at in range(first, end)]
        out.append(
            StageCost(
                forward_s=sum(variant.forward_s for variant in chosen),
                input_s=sum(variant.input_s for variant in chosen),
                weight_s=sum(variant.weight_s for variant in chosen),
                send_s=regions[end - 1].send_s if end < len(regions) else 0.0,
                saved_bytes=sum(variant.saved_bytes for variant in chosen),
                state_bytes=sum(variant.state_bytes for variant in chosen),
                working_bytes=max(variant.working_bytes for variant in chosen),
                step_s=sum(variant.step_s for variant in chosen),
            )
        )
    return tuple(out)
