"""Predict the step time of a configuration: two captured layers, the published split forced on them, counted up."""

from __future__ import annotations

import dataclasses

from autopar.passes.cost.collectives import (
    all_gather_seconds,
    all_reduce_seconds,
    reduce_scatter_seconds,
    send_seconds,
)
from autopar.passes.cost.compute import ATTENTION_SHARE
from autopar.passes.cost.devices import Device, Link, axis_links, device, link
from autopar.passes.cost.overlap import overlap_slowdown
from benchmarks.layer_times import Half, Part, parts_of
from benchmarks.published_runs import Run
from benchmarks.run_constants import CONSTANTS, Constants

RACKS = ("gb200", "gb300")
"""Devices whose fast links join several hosts."""

CUBE_MESH = {"nvlink2": ((2, "nvlink2_pair"), (4, "nvlink2_quad"))}
"""Links inside a node without a switch -> those that few ranks have among themselves."""


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one micro-batch through one layer, or through all that is outside of layers.

    Attributes:
        work: what computes, by kind: ``products``, ``attention``, ``streams``, ``loss``.
        moves: tensor- and context-parallel transfers that nothing hides.
        launches: number of kernels.
    """

    work: dict[str, float]
    moves: float
    launches: float

    @property
    def seconds(self) -> float:
        """All of it, as if the host were never late."""
        return sum(self.work.values()) + self.moves


def predict(run: Run, constants: Constants = CONSTANTS) -> dict[str, float]:
    """Return the predicted seconds of a step, with what they are made of."""
    profile = device(run.device)
    layer, rest = parts_of(
        run.model,
        run.micro_batch,
        run.dtype,
        run.device,
        run.tp,
        run.fused_kernels,
        tensor_link(run),
        run.narrow,
        run.sequence_parallel or run.tp == 1,
    )
    forward, backward = stage_seconds(run, constants, layer, rest)
    bubble = _bubble_seconds(run, constants, layer, rest, forward + backward)
    compute = run.steps * (forward + backward) + bubble
    sends = _send_seconds(run, profile) * constants.send_exposed
    exposed, hidden = _data_seconds(run, constants, _data_moves(run, constants, layer, rest), forward, backward)
    update = _update_seconds(run, constants, _stage_parameters(run, layer, rest), profile)
    total = compute + sends + exposed + overlap_slowdown(data_link(run), profile) * hidden + update
    return {
        "seconds": total,
        "compute": compute,
        "bubble": bubble,
        "exposed": exposed + sends,
        "hidden": hidden,
        "update": update,
    }


def stage_seconds(run: Run, constants: Constants, layer: Part, rest: Part) -> tuple[float, float]:
    """Return the seconds of a micro-batch's forward and backward through the fullest stage."""
    count = -(-run.layers // run.pp)
    halves = []
    for is_backward in (False, True):
        inside, outside = (times_of(run, constants, part, is_backward) for part in (layer, rest))
        seconds = inside.seconds * count + outside.seconds
        launched = constants.host_s * (inside.launches * count + outside.launches)
        halves.append(max(seconds, launched))
    forward, backward = halves
    return forward, backward + count * _recomputed(run, times_of(run, constants, layer, False))


def _bubble_seconds(run: Run, constants: Constants, layer: Part, rest: Part, fullest: float) -> float:
    """Return the seconds in which a stage waits: the first micro-batch passes the others before the steady state."""
    if run.pp == 1:
        return 0.0
    alone = dataclasses.replace(run, layers=1, pp=1)
    one = sum(stage_seconds(alone, constants, layer, rest))
    two = sum(stage_seconds(dataclasses.replace(alone, layers=2), constants, layer, rest))
    whole = one + (two - one) * (run.layers - 1)
    return max(0.0, whole - fullest) / run.chunks


def _recomputed(run: Run, forward: Times) -> float:
    """Return the seconds that a layer's backward computes again."""
    work = forward.work
    return {
        "none": 0.0,
        "attention": work["attention"],
        "streams": work["streams"],
        "ops": work["streams"] + work["products"] / 2,
        "half": forward.seconds / 2,
        "full": forward.seconds,
    }[run.recompute]


def times_of(run: Run, constants: Constants, part: Part, is_backward: bool) -> Times:
    """Return a half of a part as the software of the run computes it."""
    half, profile = (part.backward if is_backward else part.forward), device(run.device)
    sustained = constants.sustained_by(run.device, run.generation)
    streams = half.streams * _traffic(run, constants)
    products = half.products * _unaligned_times(run, half) / sustained
    if half.narrow:
        rate = constants.narrow.get(run.generation, 1.0) * (constants.rowwise if run.rowwise else 1.0)
        products = (half.products - half.wide + half.narrow / rate) / sustained
        streams += constants.cast_times * _cast_seconds(run, half, part)
    attention, scores = _attention_seconds(run, constants, half, is_backward)
    work = {
        "products": products,
        "attention": attention / sustained,
        "streams": streams + scores / profile.stream_bytes_per_s,
        "loss": _loss_seconds(run, constants, half, is_backward),
    }
    hidden = constants.tensor_hidden if run.overlaps_tensors else 0.0
    moves = half.moves * _tensor_ring_times(run) * (1.0 - hidden)
    return Times(work, moves + _ring_seconds(run, half, attention, is_backward), half.launches)


def _cast_seconds(run: Run, half: Half, part: Part) -> float:
    """Return the seconds of casting operands to 8 or 4 bits: weights once a step where their casts are kept."""
    if not run.keeps_casts or run.zero == 3:
        return half.casts
    weights = 2.0 * part.parameters / device(run.device).stream_bytes_per_s
    return max(0.0, half.casts - weights * (1.0 - 1.0 / run.steps))


def _cores_times(run: Run) -> float:
    """Return how much longer a 16-bit product takes without tensor cores, at twice the rate of 32 bits."""
    profile = device(run.device)
    return max(1.0, profile.peak_flops[run.dtype] / (2.0 * profile.peak_flops["float32"]))


def _unaligned_times(run: Run, half: Half) -> float:
    """Return how much longer a layer's products take where those of the heads run without tensor cores."""
    model = run.model
    heads = model.heads / run.tp * model.channels
    if not (run.aligned_only and half.attention and heads % 8 and run.dtype in ("float16", "bfloat16")):
        return 1.0
    around = 2.0 * model.heads * model.channels + 2.0 * model.kv_heads * model.channels
    share = around / (around + (3.0 if model.gated else 2.0) * model.ffn)
    return 1.0 + share * (_cores_times(run) - 1.0)


def _tensor_ring_times(run: Run) -> float:
    """Return how much longer the tensor-parallel transfers take in the one ring over all nodes that NCCL runs."""
    at, model = link(tensor_link(run)), run.model
    num_bytes = 2.0 * run.micro_batch * model.sequence * model.hidden
    profile = device(run.device)
    one, stacked = (float(all_reduce_seconds(run.tp, num_bytes, way, profile)) for way in (one_ring(at, run.tp), at))
    return one / stacked


def one_ring(at: Link, ranks: int) -> Link:
    """Return a link over nodes as a single ring sees it: the slowest hop sets the pace, and every hop is a step."""
    if at.inner is None:
        return at
    nodes = -(-ranks // at.ranks_inside)
    steps_s = (ranks - nodes) * at.inner.latency_s + nodes * at.latency_s
    pace = min(at.bytes_per_s, at.inner.bytes_per_s)
    return dataclasses.replace(at, latency_s=steps_s / ranks, bytes_per_s=pace, inner=None, ranks_inside=1)


def _traffic(run: Run, constants: Constants) -> float:
    if run.compiled and run.fused_kernels:
        times = 1.0
    elif run.fused_kernels:
        times = constants.hand_fine if run.model.rms_norm else constants.hand
    elif run.model.rms_norm:
        times = constants.eager_fine
    else:
        times = constants.eager if run.lean else constants.eager_old
    return times * (constants.autocast if run.mixed and not run.lean else 1.0)


def _loss_seconds(run: Run, constants: Constants, half: Half, is_backward: bool) -> float:
    """Return the seconds of the loss: as captured and fused, or by the bytes that an op-by-op framework moves."""
    if run.fused_kernels or not half.loss:
        return half.loss
    model = run.model
    logits = run.micro_batch * model.sequence * model.vocab / run.tp * (1.0 if model.causal else 5 / 32)
    num_bytes = constants.loss_bytes[1 if run.lean else 0] * (0.4 if is_backward else 0.6)
    return logits * num_bytes / device(run.device).stream_bytes_per_s


def _attention_seconds(run: Run, constants: Constants, half: Half, is_backward: bool) -> tuple[float, float]:
    """Return the seconds of attention's products and the bytes of scores that pass through memory.

    Unfused, scores and their softmax pass through memory, and a causal one computes the masked half too. A rank of a
    context-parallel group reads the keys of all others.
    """
    if not half.attention:
        return 0.0, 0.0
    model = run.model
    if run.attention == "unfused":
        times = ATTENTION_SHARE / constants.attention["unfused", "", False] * (2.0 if model.causal else 1.0)
        if run.aligned_only and run.dtype in ("float16", "bfloat16") and model.channels % 8:
            times *= _cores_times(run)
        scores = run.micro_batch * (model.heads / run.tp) * float(model.sequence) ** 2 * run.cp
        num_bytes = constants.score_bytes if run.fused_softmax else constants.loose_score_bytes
        return half.attention * times * run.cp, scores * num_bytes[is_backward]
    share = constants.attention_share(run.attention, run.generation, model.channels > 64)
    return half.attention * ATTENTION_SHARE / share * run.cp, 0.0


def _ring_seconds(run: Run, half: Half, attention: float, is_backward: bool) -> float:
    """Return what attention does not hide of keys and values that travel around a context-parallel ring."""
    if run.cp == 1 or not half.attention:
        return 0.0
    model, profile = run.model, device(run.device)
    piece = 4.0 * run.micro_batch * model.sequence * model.kv_heads * model.channels / run.tp
    at = link(axis_links((run.cp, run.tp), node_size(run), inside_link(run, run.cp), network(run))[0])
    passes = (run.cp - 1) * (2 if is_backward else 1)
    return max(0.0, passes * float(send_seconds(piece, at, profile)) - attention)


def node_size(run: Run) -> int:
    """Return how many devices share the fast links; more than a host holds where a rack does."""
    return max(run.devices_per_node, device(run.device).devices_per_node if run.device in RACKS else 0)


def inside_link(run: Run, ranks: int) -> str:
    """Return the link inside a node between so many ranks: without a switch, few have a part of the cables."""
    name = device(run.device).link_inside
    if not run.switched:
        for most, found in CUBE_MESH.get(name, ()):
            if ranks <= most:
                return found
    return name


def network(run: Run) -> str:
    """Return the link between nodes: that nearest to the speed that the run states, else the device's usual one."""
    gigabits = run.network_bits_per_s / 1e9
    if not gigabits:
        return device(run.device).link_between
    if gigabits <= 100:
        return "infiniband_100_shared" if gigabits > 50 else "ethernet_50" if gigabits > 25 else "ethernet_25"
    port = gigabits / node_size(run)
    return f"infiniband_{max([100, *(speed for speed in (200, 400, 800) if speed <= 1.5 * port)])}"


def tensor_link(run: Run) -> str:
    """Return the name of the link of the tensor-parallel axis."""
    return axis_links((run.tp,), node_size(run), inside_link(run, run.tp), network(run))[0]


def data_link(run: Run) -> Link:
    """Return the link of the data axis: stages lie farthest apart, ranks of a tensor-parallel group side by side.

    Where parameters are split over part of the axis, it is that part's.
    """
    ranks, per_node = run.shards, node_size(run)
    found = link(axis_links((ranks, run.tp), per_node, inside_link(run, ranks), network(run))[0])
    if run.early_gathers and found.inner is not None:
        return dataclasses.replace(found, bytes_per_s=found.bytes_per_s / found.ranks_inside)
    if run.network_bits_per_s > 100e9 and ranks * run.tp > per_node:
        port = run.network_bits_per_s / 8 * 0.92 / per_node
        found = dataclasses.replace(found, bytes_per_s=port * found.ranks_inside, shared=False)
    return one_ring(found, ranks)


def _stage_parameters(run: Run, layer: Part, rest: Part) -> float:
    return -(-run.layers // run.pp) * layer.parameters + rest.parameters


def _send_seconds(run: Run, profile: Device) -> float:
    """Return the seconds of a step's transfers between stages: every chunk's result and its gradient."""
    if run.pp == 1:
        return 0.0
    model = run.model
    num_bytes = 2.0 * run.micro_batch * model.sequence * model.hidden / run.tp
    inside = run.tp * run.cp * run.dp * run.pp <= node_size(run)
    at = link(inside_link(run, 2) if inside else network(run))
    return 2.0 * (run.steps * run.chunks + run.pp - 1) * float(send_seconds(num_bytes, at, profile))


def _data_seconds(
    run: Run, constants: Constants, moves: tuple[float, float], forward: float, backward: float
) -> tuple[float, float]:
    """Return the exposed and the hidden seconds of what travels over the data axis in a step.

    The last micro-batches of interleaved chunks lie a round of the stages apart, and each chunk's gradients travel
    during those of the next.
    """
    gathers, reductions = moves
    hides = 1.0 if run.overlaps else 0.0
    if run.zero == 3:
        pairs = [(hides * forward, gathers), (hides * backward, gathers + reductions)]
        exposed = run.steps * sum(max(0.0, move - work) for work, move in pairs)
        return exposed, run.steps * sum(min(move, work) for work, move in pairs)
    if run.zero == 2 and run.pp == 1:
        reductions *= run.steps
        backward *= run.steps
    rounds = min(run.pp, run.steps) if run.chunks > 1 else 1
    behind = constants.hide_share * hides * backward * rounds
    pairs = [(behind, reductions), (hides * forward * rounds, gathers)]
    return sum(max(0.0, move - work) for work, move in pairs), sum(min(move, work) for work, move in pairs)


def _data_moves(run: Run, constants: Constants, layer: Part, rest: Part) -> tuple[float, float]:
    """Return the seconds of gathering all parameters once and of reducing all gradients once over the data axis."""
    if run.dp * run.cp == 1:
        return 0.0, 0.0
    at, profile, ranks = data_link(run), device(run.device), run.shards
    pieces = [layer.parameters] * -(-run.layers // run.pp) + [rest.parameters]
    if run.zero == 0:
        return 0.0, sum(float(all_reduce_seconds(ranks, p * run.reduced_bytes, at, profile)) for p in pieces)
    gathers = sum(float(all_gather_seconds(ranks, p * run.gathered_bytes / ranks, 0, at, profile)) for p in pieces)
    reductions = sum(float(reduce_scatter_seconds(ranks, p * run.reduced_bytes, 0, at, profile)) for p in pieces)
    if run.copies > 1:
        size = sum(pieces) * run.reduced_bytes / ranks
        reductions += float(all_reduce_seconds(run.copies, size, link(network(run)), profile))
    if run.early_gathers and run.zero == 3:
        return gathers / constants.early_gather, reductions / constants.early_gather
    return gathers, reductions


def _update_seconds(run: Run, constants: Constants, parameters: float, profile: Device) -> float:
    """Return the seconds of the optimizer and of accumulating gradients."""
    share = parameters / (run.shards if run.zero else 1)
    update = constants.adam_bytes * share
    if run.steps > 1:
        update += run.steps * constants.accumulate_bytes[run.fused_accumulation] * parameters
    return update / profile.stream_bytes_per_s
