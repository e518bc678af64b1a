"""The ways to run a region in a stage: how its parameters lie along the data axis, and what it computes again.

ZeRO and recomputation in closed form, from one answer of the split ILP on the mesh inside a stage. What travels along
the data axis hides behind the region's own compute; what hides slows it by a part of its own time, the rest is paid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .cost.collectives import all_gather_seconds, all_reduce_seconds, reduce_scatter_seconds, send_seconds
from .cost.devices import Device, Link
from .cost.memory import parameter_bytes
from .price_regions import PricedRegion
from .solve.stage_records import Region, Variant

UPDATE_BYTES = 30.0
"""Bytes that the optimizer moves for one element: moments, master copy and gradient read, all but the last written."""

ACCUMULATE_BYTES = 10.0
"""Bytes moved to add one element of a micro-batch's gradient to the sum."""

RECOMPUTE = ("", "light", "full")
"""What is computed again: nothing; what memory traffic bounds (norms, activations); the whole region."""


@dataclass(frozen=True)
class Conditions:
    """What the variants of all regions share.

    Attributes:
        device: where they run.
        data: ranks of the data axis.
        data_link, stage_link: links of the data and of the pipeline axis.
        micro_batches: of a step.
        optimizer: its name.
        zero: ZeRO stages that may be chosen.
        recompute: entries of ``RECOMPUTE`` that may be chosen.
        sustained: the part of the rate of single products and attention kernels that a step sustains.
        attention, streams: factors on attention and on memory traffic.
        contention: the part of a hidden transfer's time by which it slows the compute that hides it.
        update_bytes: that the optimizer moves for an element.
        covered: the part of the backward behind which gradients hide; 0 where software does not overlap.
    """

    device: Device
    data: int
    data_link: Link
    stage_link: Link
    micro_batches: int
    optimizer: str = "adamw"
    zero: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = RECOMPUTE
    sustained: float = 1.0
    attention: float = 1.0
    streams: float = 1.0
    contention: float = 0.2
    covered: float = 0.85
    update_bytes: float = UPDATE_BYTES


def region_variants(regions: Sequence[PricedRegion], conditions: Conditions) -> tuple[Region, ...]:
    """Return the regions with their variants, equal ones sharing one tuple."""
    known: dict[int, tuple[Variant, ...]] = {}
    out = []
    for region in regions:
        if region.kind not in known:
            known[region.kind] = _variants(region, conditions)
        send_s = float(send_seconds(float(region.send_bytes), conditions.stage_link, conditions.device))
        out.append(Region(region.name, known[region.kind], send_s if region.send_bytes else 0.0))
    return tuple(out)


def _variants(region: PricedRegion, conditions: Conditions) -> tuple[Variant, ...]:
    levels = conditions.zero if conditions.data > 1 and region.numel else (min(conditions.zero),)
    made = [_variant(region, conditions, level, again) for level in levels for again in conditions.recompute]
    return tuple(one for one in made if not any(_beats(other, one) for other in made if other is not one))


def _beats(one: Variant, other: Variant) -> bool:
    """Tell whether a variant is nowhere dearer than another one, and somewhere cheaper or named before it."""
    mine, theirs = _figures(one), _figures(other)
    return all(a <= b for a, b in zip(mine, theirs, strict=True)) and (mine != theirs or one.name < other.name)


def _figures(variant: Variant) -> tuple[float, ...]:
    return (
        variant.forward_s,
        variant.input_s,
        variant.weight_s,
        variant.step_s,
        variant.state_bytes,
        variant.saved_bytes,
        variant.working_bytes,
    )


def _variant(region: PricedRegion, conditions: Conditions, zero: int, again: str) -> Variant:
    scale = (1.0 / conditions.sustained, conditions.attention / conditions.sustained, conditions.streams)
    forward, inputs, weights = (work.times(*scale).seconds for work in (region.forward, region.input, region.weight))
    saved, working = region.saved_bytes, 0
    if again == "light":
        inputs += region.again.times(*scale).seconds
        saved, working = region.light_bytes, region.saved_bytes - region.light_bytes
    if again == "full":
        inputs += forward
        saved, working = region.input_bytes, region.saved_bytes
    backward = inputs + weights
    moves = _data_moves(region, conditions)
    step = moves["update"] / (conditions.data if zero else 1) + region.once.times(*scale).seconds
    if conditions.micro_batches > 1:
        weights += moves["accumulate"] / (conditions.data if zero == 3 else 1)
    if zero == 0:
        step += _exposed(moves["reduce"], conditions.covered * backward, conditions)
    if zero == 1:
        step += _exposed(moves["scatter"], conditions.covered * backward, conditions)
    if zero in (1, 2):
        step += _exposed(moves["gather"], conditions.covered * forward, conditions)
    if zero == 2:
        weights += _exposed(moves["scatter"], conditions.covered * backward, conditions)
    if zero == 3:
        weights += _exposed(moves["gather"] + moves["scatter"], conditions.covered * backward, conditions)
        forward += _exposed(moves["gather"], conditions.covered * forward, conditions)
    state, gathered = _state_bytes(region, conditions, zero)
    name = " + ".join(
        part for part in (f"zero{zero}" if conditions.data > 1 else "", again and f"{again} again") if part
    )
    return Variant(name or "kept", forward, inputs, weights, step, state, saved, working + gathered)


def _exposed(move_s: float, work_s: float, conditions: Conditions) -> float:
    """Return what a transfer adds to the work that it may hide behind."""
    hidden = min(move_s, work_s)
    return move_s - hidden + conditions.contention * hidden


def _data_moves(region: PricedRegion, conditions: Conditions) -> dict[str, float]:
    """Return the seconds of moving parameters and gradients once along the data axis, and of updating."""
    device, link, ranks = conditions.device, conditions.data_link, conditions.data
    trained = [(numel, itemsize) for numel, itemsize, grads in region.parameters if grads]
    size = float(sum(numel * itemsize for numel, itemsize in trained))
    numel = float(sum(count for count, _ in trained))
    out = {
        "update": conditions.update_bytes * numel / device.stream_bytes_per_s,
        "accumulate": ACCUMULATE_BYTES * numel / device.stream_bytes_per_s,
        "reduce": 0.0,
        "scatter": 0.0,
        "gather": 0.0,
    }
    if ranks > 1 and size:
        out["reduce"] = float(all_reduce_seconds(ranks, size, link, device))
        out["scatter"] = float(reduce_scatter_seconds(ranks, size, 0, link, device))
        out["gather"] = float(all_gather_seconds(ranks, size / ranks, 0, link, device))
    return out


def _state_bytes(region: PricedRegion, conditions: Conditions, zero: int) -> tuple[int, int]:
    """Return the bytes of parameters, gradients and optimizer state, and of what is gathered while the region works."""
    total, gathered = 0, 0
    for numel, itemsize, trained in region.parameters:
        whole = parameter_bytes(numel, itemsize, trained, conditions.optimizer)
        share = parameter_bytes(-(-numel // conditions.data), itemsize, trained, conditions.optimizer)
        total += share.parameter if zero == 3 else whole.parameter
        total += share.gradient if zero >= 2 else whole.gradient
        total += share.optimizer if zero >= 1 else whole.optimizer
        if zero == 3:
            gathered += 2 * whole.parameter + whole.gradient
        if zero == 2:
            gathered += whole.gradient
    return total, gathered
