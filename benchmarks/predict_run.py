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
from benchmarks.expert_times import (
    copies_seconds,
    exchange_seconds,
    expert_link,
    group_seconds,
    routed_config,
    routed_part,
)
from benchmarks.layer_times import Half, Part, joined, parts_of, with_casts
from benchmarks.models.transformer import TransformerConfig
from benchmarks.published_runs import Run, expert_replicas
from benchmarks.run_constants import CONSTANTS, Constants
from benchmarks.run_links import data_link, inside_link, network, node_size, one_ring, tensor_link

Layers = tuple[tuple[Part, int], ...]
"""Kinds of layers, the first ones of the model first, and how many there are of each."""


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one micro-batch through one layer, or through all that is outside of layers.

    Attributes:
        work: what computes, by kind: ``products``, ``attention``, ``streams``, ``loss``.
        moves: tensor- and context-parallel transfers that nothing hides.
    """

    work: dict[str, float]
    moves: float

    @property
    def seconds(self) -> float:
        """All of it, as if the host were never late."""
        return sum(self.work.values()) + self.moves


def predict(run: Run, constants: Constants = CONSTANTS) -> dict[str, float]:
    """Return the predicted seconds of a step, with what they are made of."""
    profile = device(run.device)
    layers, rest = layers_of(run, constants)
    forward, backward = stage_seconds(run, constants, fullest(run, layers), rest, losses_of(run) if run.pp == 1 else 1)
    bubble = _bubble_seconds(run, constants, layers, rest, forward + backward)
    compute = run.steps * (forward + backward) + bubble
    sends = _send_seconds(run, profile) * constants.send_exposed
    exposed, hidden = _data_seconds(run, constants, _data_moves(run, constants, layers, rest), forward, backward)
    update = _update_seconds(run, constants, fullest(run, layers), rest, profile)
    total = compute + sends + exposed + overlap_slowdown(data_link(run), profile) * hidden + update
    return {
        "seconds": total,
        "compute": compute,
        "bubble": bubble,
        "exposed": exposed + sends,
        "hidden": hidden,
        "update": update,
    }


def layers_of(run: Run, constants: Constants) -> tuple[Layers, Part]:
    """Return the kinds of layers of a run with their numbers, and what is around them."""
    experts = run.experts
    layer, rest = _parts(run, run.model)
    if experts is None:
        return ((layer, run.layers),), rest
    routed = routed_part(routed_config(run), run.dtype, run.device, run.fused_kernels, run.narrow)
    routed = with_casts(routed, 0.0 if experts.fused else constants.expert_casts)
    kinds: Layers = ((joined(layer, routed), run.layers - experts.dense_layers),)
    if experts.dense_layers:
        dense = dataclasses.replace(run.model, ffn=experts.dense_ffn)
        kinds = ((_parts(run, dense)[0], experts.dense_layers), *kinds)
    return kinds, rest


def _parts(run: Run, model: TransformerConfig) -> tuple[Part, Part]:
    whole = run.sequence_parallel or run.tp == 1
    at = tensor_link(run)
    return parts_of(model, run.micro_batch, run.dtype, run.device, run.tp, run.fused_kernels, at, run.narrow, whole)


def fullest(run: Run, layers: Layers) -> Layers:
    """Return the layers of the fullest stage: where there are several, the last ones of the model."""
    left = -(-run.layers // run.pp)
    out: list[tuple[Part, int]] = []
    for part, count in reversed(layers):
        out.insert(0, (part, min(count, left)))
        left -= min(count, left)
    return tuple(out)


def losses_of(run: Run) -> int:
    """Return how often a step has a head and a loss: once more for each layer that predicts tokens farther ahead."""
    return 1 + (run.experts.ahead if run.experts is not None else 0)


def stage_seconds(run: Run, constants: Constants, layers: Layers, rest: Part, losses: int = 1) -> tuple[float, float]:
    """Return the seconds of a micro-batch's forward and backward through these layers and what is around them."""
    halves, parts = [], (*layers, (rest, losses))
    for is_backward in (False, True):
        seconds = sum(times_of(run, constants, part, is_backward).seconds * count for part, count in parts)
        launched = sum(host_seconds(run, constants, part, is_backward) * count for part, count in parts)
        halves.append(max(seconds, launched))
    forward, backward = halves
    again = sum(count * _recomputed(run, times_of(run, constants, part, False)) for part, count in layers)
    return forward, backward + again


def host_seconds(run: Run, constants: Constants, part: Part, is_backward: bool) -> float:
    """Return what the host needs to launch a half of a part."""
    if part.experts and run.experts is not None and not run.experts.graphed:
        return constants.expert_host_s[is_backward]
    return constants.host_s * (part.backward if is_backward else part.forward).launches


def _bubble_seconds(run: Run, constants: Constants, layers: Layers, rest: Part, fullest: float) -> float:
    """Return the seconds in which a stage waits: the first micro-batch passes the others before the steady state."""
    if run.pp == 1:
        return 0.0
    return max(0.0, sum(stage_seconds(run, constants, layers, rest, losses_of(run))) - fullest) / run.chunks


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
    if part.experts and run.experts is not None:
        covered = constants.expert_hidden[run.experts.graphed] if run.experts.overlaps else 0.0
        moves += 2.0 * exchange_seconds(run) * (1.0 - covered)
        work["streams"] += 2.0 * copies_seconds(run) + group_seconds(run, is_backward)
    return Times(work, moves + _ring_seconds(run, half, attention, is_backward))


def _cast_seconds(run: Run, half: Half, part: Part) -> float:
    """Return the seconds of casting operands to 8 or 4 bits: weights once a step where their casts are kept."""
    if not run.keeps_casts or run.zero == 3:
        return half.casts
    kept = part.parameters + (part.experts if run.experts is not None and not run.experts.fused else 0.0)
    weights = 2.0 * kept / device(run.device).stream_bytes_per_s
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


def _data_moves(run: Run, constants: Constants, layers: Layers, rest: Part) -> tuple[float, float]:
    """Return the seconds of gathering all parameters once and of reducing all gradients once over the data axis.

    Routed experts travel among the ranks that hold the same ones.
    """
    stage = fullest(run, layers)
    gathers = reductions = 0.0
    if run.dp * run.cp > 1:
        pieces = [part.parameters for part, count in stage for _ in range(count)] + [rest.parameters]
        gathers, reductions = _moved(run, constants, pieces, run.shards, data_link(run))
    if run.experts is not None and expert_replicas(run) > 1:
        ranks = expert_replicas(run)
        at = one_ring(expert_link(run, ranks, run.experts.ep * run.experts.etp), ranks)
        pieces = [part.experts for part, count in stage for _ in range(count) if part.experts]
        gathered, reduced = _moved(run, constants, pieces, ranks, at)
        gathers, reductions = gathers + gathered, reductions + reduced
    return gathers, reductions


def _moved(run: Run, constants: Constants, pieces: list[float], ranks: int, at: Link) -> tuple[float, float]:
    """Return the seconds of gathering and of reducing pieces of so many parameters over so many ranks."""
    profile = device(run.device)
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


def _update_seconds(run: Run, constants: Constants, layers: Layers, rest: Part, profile: Device) -> float:
    """Return the seconds of the optimizer and of accumulating gradients."""
    parameters = sum(part.parameters * count for part, count in layers) + rest.parameters
    experts = sum(part.experts * count for part, count in layers)
    share = parameters / (run.shards if run.zero else 1)
    if run.experts is not None:
        share += experts / (expert_replicas(run) if run.zero else 1)
    update = constants.adam_bytes * share
    if run.steps > 1:
        update += run.steps * constants.accumulate_bytes[run.fused_accumulation] * (parameters + experts)
    return update / profile.stream_bytes_per_s
