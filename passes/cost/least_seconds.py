"""What a step takes at least on a mesh, however it is split: no communication, nothing done twice, no waiting."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.mesh import Mesh

from ..find_regions import find_regions, late_nodes, region_of
from ..program import Program, tensor_operands, tensors_of
from .compute import call_seconds, compute_dtype, is_view, local_lengths, local_seconds, numbers_drawn
from .devices import Device, device
from .fusion import ALONE, Traffic


@dataclass(frozen=True)
class Share:
    """Seconds of a part of a step: of one device that does all of it, without launches, and of the launches."""

    work_s: float = 0.0
    launch_s: float = 0.0

    def __add__(self, other: Share) -> Share:
        return Share(self.work_s + other.work_s, self.launch_s + other.launch_s)

    def each(self, ranks: float, count: int) -> float:
        """Return the seconds of one of ``count`` micro-batches on so many ranks, each of which launches all kernels."""
        return self.work_s / (ranks * count) + self.launch_s


@dataclass(frozen=True)
class LeastSeconds:
    """Work that is shared out evenly, and launches of kernels, which every micro-batch has anew.

    Attributes:
        num_ranks: of the mesh.
        regions: of every region of the model its forward, its backward for inputs and the one for weights.
    """

    num_ranks: int
    regions: tuple[tuple[Share, Share, Share], ...]

    @staticmethod
    def of(program: Program, mesh: Mesh) -> LeastSeconds:
        """Return the figures of an annotated program on a mesh."""
        profile, spans = device(mesh.device), find_regions(program)
        at = region_of(program, spans)
        late = late_nodes(program, at)
        parts = [[Share(), Share(), Share()] for _ in spans]
        for node in program.ops():
            part = 0 if node.meta["phase"] == "forward" else 2 if node.name in late else 1
            parts[at[node.name]][part] += _share(node, profile)
        return LeastSeconds(mesh.num_ranks, tuple((one, two, three) for one, two, three in parts))

    def launches(self, region: int) -> tuple[float, float, float]:
        """Return the seconds of the launches of a region's three parts."""
        forward, inputs, weights = self.regions[region]
        return forward.launch_s, inputs.launch_s, weights.launch_s

    def seconds(self, stages: int, chunks: int, count: int) -> float:
        """Return a bound for stages on so many ranks, at most ``chunks`` on each, and ``count`` micro-batches.

        The largest of: a rank's share of all work, after the mean of what the ranks wait for the first micro-batch to
        reach them (with stages of equal length); the forward of one micro-batch, which every backward waits for, and
        then a rank's share of all backwards; a micro-batch there and back, and all others past the mean stage.
        """
        forward, inputs, weights = (
            sum(parts, Share()).each(self.num_ranks / stages, count) for parts in zip(*self.regions, strict=True)
        )
        reached = forward * (stages - 1) / (2 * chunks * stages)
        return max(
            count * (forward + inputs + weights) / stages + reached,
            forward + count * (inputs + weights) / stages,
            forward + inputs + (count - 1) * inputs / (chunks * stages),
        )


def _share(node: fx.Node, profile: Device) -> Share:
    traffic: Traffic = node.meta.get("traffic", ALONE)
    before, after = [operand.meta["val"] for operand in tensor_operands(node)], tensors_of(node)
    num_bytes = sum(
        value.numel() * value.element_size() * traffic.share(what, slot)
        for what, side in (("operands", before), ("results", after))
        for slot, value in enumerate(side)
    )
    rule = node.meta["rule"]
    shapes = [tuple(value.shape) for value in (*before, *after)]
    lengths = local_lengths(rule, shapes, shapes)
    how = {"launches": traffic.launches, "drawn": numbers_drawn(rule, after)}
    seconds = local_seconds(node.target, rule, lengths, num_bytes, compute_dtype([*before, *after]), profile, **how)
    launch_s = (1.0 if is_view(node.target) else traffic.launches) * call_seconds(node.target, profile)
    return Share(seconds - launch_s, launch_s)
