"""Predict the step time of a configuration: two captured layers, the published split forced on them, counted up."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from functools import lru_cache
from typing import Any

import torch

from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.cost.collectives import all_gather_seconds, all_reduce_seconds, reduce_scatter_seconds
from autopar.passes.cost.compute import ATTENTION_SHARE, is_view
from autopar.passes.cost.devices import Device, Link, axis_links, device, link
from autopar.passes.cost.fusion import ALONE, mark_traffic
from autopar.passes.enumerate_strategies import StrategyTable, choice_names
from autopar.passes.fold import fold
from autopar.passes.pipeline import make_plan
from autopar.passes.program import Program
from autopar.passes.solve.layout_graph import Prices
from autopar.plans import Options
from benchmarks.models.transformer import TransformerConfig, build
from benchmarks.published_runs import Run

MEGATRON: dict[str, str] = {
    "layers.*.attention.q_proj": "column",
    "layers.*.attention.k_proj": "column",
    "layers.*.attention.v_proj": "column",
    "layers.*.attention.o_proj": "row",
    "layers.*.mlp.up_proj": "column",
    "layers.*.mlp.down_proj": "row",
}
"""Constraints that force Megatron's split of a layer; the solver fills in the rest."""

GATE = {"layers.*.mlp.gate_proj": "column"}
ADAM_BYTES = 30.0
"""Bytes moved for one element of a rank's share: moments, master copy and gradient read, all but the last written."""

ACCUMULATE_BYTES = 10.0
"""Bytes moved to add one element of a gradient to the float32 sum."""

SCORE_BYTES = (11.0, 17.0)
"""Bytes moved for one attention score in the forward and in the backward when it passes through memory: product,
scale and mask, softmax, dropout, product."""

ATTENTION_SHARES = {"unfused": 0.6, "first": 0.3, "second": 0.7, "ported": 0.28, "tuned": 0.85}
"""The part of the achievable rate that attention reaches, by the kernels of a run's time."""

RACKS = ("gb200", "gb300")
"""Devices whose fast links join several hosts."""

SUSTAINED = 0.9
"""The part of the rate of single products that a whole step sustains."""

EAGER_STREAMS = 1.5
"""Memory traffic of frameworks that run op by op, in that of the captured graph."""

MIXED_STREAMS = 1.5
"""Memory traffic under autocast, in that of 16 bits throughout: norms and the loss in float32, casts of weights."""

HOST_S = 8e-6
"""What the host needs to launch an op without a graph."""

CONTENTION = 0.2
"""The part of a hidden transfer's time by which it slows the compute that hides it: it takes units and bandwidth."""

HIDE_SHARE = 0.85
"""The part of the backward behind which gradients can hide: the first bucket must be full."""


@dataclasses.dataclass(frozen=True)
class Half:
    """Seconds of the forward or the backward of one micro-batch: products, attention, the rest, collectives.

    ``launches`` counts kernels.
    """

    products: float
    attention: float
    streams: float
    moves: float
    launches: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.products + self.attention + self.streams + self.moves


@dataclasses.dataclass(frozen=True)
class Part:
    """One layer, or all that is outside of layers, and its parameters on a rank."""

    forward: Half
    backward: Half
    parameters: float


@lru_cache(maxsize=4)
def captured(config: TransformerConfig, batch: int, dtype: str) -> tuple[Program, dict[str, str]]:
    """Return the annotated program of two layers, and which of its ops are alike."""
    floats = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    model, args = build(config, batch, floats.get(dtype, torch.float32))
    program = annotate(capture(model, args, {}))
    return program, fold(program).class_of


@lru_cache(maxsize=4096)
def parts_of(
    config: TransformerConfig, batch: int, dtype: str, name: str, tp: int, fused: bool, links: tuple[str, ...] = ()
) -> tuple[Part, Part]:
    """Return one layer and the rest, on each of ``tp`` devices; ``fused`` as ``Run.fused_kernels``.

    ``links`` is needed where they lie in several nodes.
    """
    program, classes = captured(config, batch, dtype)
    mesh = Mesh((tp,), ("model",), name, links or (device(name).link_inside,))
    prices = dataclasses.replace(Prices.of(mesh), device=computing(name, dtype))
    table = StrategyTable(prices)
    choices: dict[str, tuple[str, ...]] = {}
    moves: dict[tuple[bool, str], float] = defaultdict(float)
    layouts: dict[str, str] = {}
    if tp > 1:
        constraints = {**MEGATRON, **(GATE if config.gated else {})}
        plan = make_plan(program, mesh, Options(constraints=constraints, optimizer="adamw"))
        choices, layouts = plan.choices, plan.parameters
        nodes = program.nodes()
        for row in plan.collectives:
            moves[_in_layer(nodes[row.tensor].meta.get("module", "")), row.phase] += row.seconds
    mark_traffic(program, classes)
    if not fused:
        for node in program.ops():
            del node.meta["traffic"]
    seconds: dict[tuple[bool, str, str], float] = defaultdict(float)
    for node in program.ops():
        strategies = table.strategies(node)
        at = 0
        if tp > 1:
            names = [choice_names(node.meta["rule"], row) for row in strategies.choices]
            at = names.index(choices[node.name])
        inside = _in_layer(node.meta.get("module", ""))
        seconds[inside, node.meta["phase"], _kind(node.target)] += float(strategies.seconds[at])
        launches = 0.0 if is_view(node.target) else node.meta.get("traffic", ALONE).launches
        seconds[inside, node.meta["phase"], "launches"] += launches
    sizes: dict[bool, float] = defaultdict(float)
    for role in program.inputs:
        if role.kind == "parameter":
            numel = program.nodes()[role.node].meta["val"].numel()
            sizes[role.name.startswith("layers.")] += numel / (tp if "S" in layouts.get(role.name, "R") else 1)
    out = []
    for inside, count in ((True, 2), (False, 1)):
        halves = [
            Half(
                *(seconds[inside, phase, kind] / count for kind in ("products", "attention", "streams")),
                moves[inside, phase] / count,
                seconds[inside, phase, "launches"] / count,
            )
            for phase in ("forward", "backward")
        ]
        out.append(Part(halves[0], halves[1], sizes[inside] / count))
    return out[0], out[1]


def _kind(target: Any) -> str:
    if target is torch.ops.autopar.contract.default:
        return "products"
    attention = (torch.ops.autopar.attention.default, torch.ops.autopar.attention_backward.default)
    return "attention" if target in attention else "streams"


def _in_layer(module: str) -> bool:
    return module.startswith("layers.")


def computing(name: str, dtype: str) -> Device:
    """Return the device that computes in ``dtype``: products of float32 in TF32 where that is what a run says."""
    profile = device(name)
    if dtype != "tfloat32" or "tfloat32" not in profile.peak_flops:
        return profile
    peaks = {**profile.peak_flops, "float32": profile.peak_flops["tfloat32"]}
    return dataclasses.replace(profile, peak_flops=peaks)


def node_size(run: Run) -> int:
    """Return how many devices share the fast links; more than a host holds where a rack does."""
    return max(run.devices_per_node, device(run.device).devices_per_node if run.device in RACKS else 0)


def model_links(run: Run) -> tuple[str, ...]:
    """Return the link of a tensor-parallel axis over several nodes, by the speed that the run states."""
    return axis_links((run.tp,), node_size(run), device(run.device).link_inside, network(run))


def network(run: Run) -> str:
    """Return the link between nodes: that nearest to the speed that the run states, else the device's usual one."""
    gigabits = run.network_bits_per_s / 1e9
    if not gigabits:
        return device(run.device).link_between
    if gigabits <= 100:
        return "infiniband_100_shared" if gigabits > 50 else "ethernet_50" if gigabits > 25 else "ethernet_25"
    port = gigabits / node_size(run)
    return f"infiniband_{max([100, *(speed for speed in (200, 400, 800) if speed <= 1.5 * port)])}"


def data_link(run: Run) -> Link:
    """Return the link of the data axis: ranks of one tensor-parallel group are neighbours in a node."""
    profile = device(run.device)
    per_node = node_size(run)
    found = link(axis_links((run.dp, run.tp), per_node, profile.link_inside, network(run))[0])
    if run.network_bits_per_s <= 100e9 or run.num_devices <= per_node:
        return found
    port = run.network_bits_per_s / 8 * 0.92 / per_node
    return dataclasses.replace(found, bytes_per_s=port * found.ranks_inside, shared=False)


def predict(run: Run) -> dict[str, float]:
    """Return the predicted seconds of a step, with what they are made of."""
    profile = device(run.device)
    key = (run.model, run.micro_batch, run.dtype, run.device, run.tp, run.fused_kernels)
    spans = run.tp > node_size(run)
    layer, rest = parts_of(*key, model_links(run)) if spans else parts_of(*key)
    layer, rest = (_as_run(run, part) for part in (_attending(run, layer, profile), rest))
    forward, backward = (
        max(
            sum(half.seconds * count for half, count in halves),
            HOST_S * sum(half.launches * count for half, count in halves),
        )
        for halves in (
            [(layer.forward, run.layers), (rest.forward, 1)],
            [(layer.backward, run.layers), (rest.backward, 1)],
        )
    )
    if run.recompute == "full":
        backward += run.layers * layer.forward.seconds
    elif run.recompute == "attention":
        backward += run.layers * layer.forward.attention
    elif run.recompute == "ops":
        backward += run.layers * (layer.forward.streams + layer.forward.products / 2)
    moves = _data_moves(run, layer, rest, profile)
    hidden_forward = min(moves["gathers"], forward) if run.overlaps else 0.0
    compute = run.steps * (forward + backward)
    exposed, hidden = 0.0, 0.0
    if run.zero == 3:
        for work, move in ((forward, moves["gathers"]), (backward, moves["gathers"] + moves["reductions"])):
            hidden += run.steps * min(move, work)
            exposed += run.steps * max(0.0, move - work)
    elif run.dp > 1:
        covered = HIDE_SHARE * backward if run.overlaps else 0.0
        exposed += max(0.0, moves["reductions"] - covered)
        hidden += min(moves["reductions"], covered)
        exposed += max(0.0, moves["gathers"] - hidden_forward)
        hidden += hidden_forward
    parameters = run.layers * layer.parameters + rest.parameters
    share = parameters / (run.dp if run.zero else 1)
    update = ADAM_BYTES * share / profile.stream_bytes_per_s
    if run.steps > 1 or run.zero < 3:
        update += run.steps * ACCUMULATE_BYTES * parameters / profile.stream_bytes_per_s
    total = compute + exposed + CONTENTION * hidden + update
    return {"seconds": total, "compute": compute, "exposed": exposed, "hidden": hidden, "update": update}


def _attending(run: Run, layer: Part, profile: Device) -> Part:
    """Return the layer with the attention kernels of the run.

    Unfused, scores and their softmax pass through memory, and a causal one computes the masked half too.
    """
    model = run.model
    times, score_bytes = ATTENTION_SHARE / ATTENTION_SHARES[run.attention], (0.0, 0.0)
    if run.attention == "unfused":
        times *= 2.0 if model.causal else 1.0
        score_bytes = SCORE_BYTES
    scores = run.micro_batch * (model.heads / run.tp) * float(model.sequence) ** 2
    halves = []
    for half, num_bytes in zip((layer.forward, layer.backward), score_bytes, strict=True):
        streams = half.streams + scores * num_bytes / profile.stream_bytes_per_s
        halves.append(dataclasses.replace(half, attention=half.attention * times, streams=streams))
    return Part(halves[0], halves[1], layer.parameters)


def _as_run(run: Run, part: Part) -> Part:
    """Return a part as the software of the run computes it."""
    times = (MIXED_STREAMS if run.mixed else 1.0) * (1.0 if run.fused_kernels else EAGER_STREAMS)
    halves = (
        dataclasses.replace(
            half, products=half.products / SUSTAINED, attention=half.attention / SUSTAINED, streams=half.streams * times
        )
        for half in (part.forward, part.backward)
    )
    return Part(*halves, part.parameters)


def _data_moves(run: Run, layer: Part, rest: Part, profile: Device) -> dict[str, float]:
    """Return the seconds of gathering all parameters once and of reducing all gradients once over the data axis."""
    if run.dp == 1:
        return {"gathers": 0.0, "reductions": 0.0}
    at = data_link(run)
    pieces = [layer.parameters] * run.layers + [rest.parameters]
    reduced: Any = 2.0 if run.dtype in ("float16", "bfloat16") else 4.0
    if run.zero == 0:
        return {"gathers": 0.0, "reductions": sum(all_reduce_seconds(run.dp, p * reduced, at, profile) for p in pieces)}
    return {
        "gathers": sum(all_gather_seconds(run.dp, p * 2.0 / run.dp, 0, at, profile) for p in pieces),
        "reductions": sum(reduce_scatter_seconds(run.dp, p * reduced, 0, at, profile) for p in pieces),
    }
