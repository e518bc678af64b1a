"""Seconds of one layer of a model and of what is around its layers, captured, split as published and priced."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.cost.compute import is_view
from autopar.passes.cost.devices import Device, device
from autopar.passes.cost.fusion import ALONE, mark_traffic
from autopar.passes.enumerate_strategies import StrategyTable, choice_names
from autopar.passes.fold import fold
from autopar.passes.pipeline import make_plan
from autopar.passes.program import Program, tensor_operands
from autopar.passes.solve.layout_graph import Prices
from autopar.plans import Options
from benchmarks.models.transformer import TransformerConfig, build

MEGATRON: dict[str, str] = {
    "layers.*.attention.q_proj": "column",
    "layers.*.attention.k_proj": "column",
    "layers.*.attention.v_proj": "column",
    "layers.*.attention.o_proj": "row",
    "layers.*.mlp.up_proj": "column",
    "layers.*.mlp.down_proj": "row",
}
"""Constraints that force Megatron's split of a layer; the solver fills in the rest."""

RESIDUAL = re.compile(r"^layers\.\d+$|norm$|o_proj$|down_proj$")
"""Modules whose ops, products apart, Megatron without sequence parallelism computes whole on every rank."""

GATE = {"layers.*.mlp.gate_proj": "column"}

Seconds = defaultdict[tuple[bool, str, str], float]
"""Whether in a layer, the half, the kind -> seconds, or kernels."""


@dataclasses.dataclass(frozen=True)
class Half:
    """Seconds of the forward or the backward of one micro-batch.

    Attributes:
        products: matrix products, at the speed of single kernels.
        narrow: those of them that a run of 8 or 4 bits computes in these, at that speed; else 0.
        wide: the same ones in 16 bits.
        attention: as ``passes.cost`` prices it.
        streams: everything else that passes through memory, without the loss.
        loss: the loss and its gradient on the logits.
        casts: reading the operands of the narrow products once.
        moves: collectives of tensor parallelism.
        launches: number of kernels.
    """

    products: float = 0.0
    narrow: float = 0.0
    wide: float = 0.0
    attention: float = 0.0
    streams: float = 0.0
    loss: float = 0.0
    casts: float = 0.0
    moves: float = 0.0
    launches: float = 0.0


@dataclasses.dataclass(frozen=True)
class Part:
    """One layer, or all that is outside of layers, and its parameters on a rank.

    Attributes:
        forward, backward: of a micro-batch.
        parameters: on a rank, those of routed experts apart.
        experts: parameters of routed experts.
    """

    forward: Half
    backward: Half
    parameters: float
    experts: float = 0.0


def with_casts(part: Part, times: float) -> Part:
    """Return a part whose casts take ``times`` as long: 0 where products cast their operands themselves."""
    forward, backward = (dataclasses.replace(half, casts=times * half.casts) for half in (part.forward, part.backward))
    return dataclasses.replace(part, forward=forward, backward=backward)


def joined(first: Part, second: Part) -> Part:
    """Return two parts that follow each other as one."""
    forward, backward = (
        Half(**{field.name: getattr(a, field.name) + getattr(b, field.name) for field in dataclasses.fields(Half)})
        for a, b in ((first.forward, second.forward), (first.backward, second.backward))
    )
    return Part(forward, backward, first.parameters + second.parameters, first.experts + second.experts)


def tensor_dtype(dtype: str) -> torch.dtype:
    """Return the dtype of tensors in a run: TF32 computes on those of float32."""
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(dtype, torch.float32)


@lru_cache(maxsize=4)
def captured(config: TransformerConfig, batch: int, dtype: str) -> tuple[Program, dict[str, str]]:
    """Return the annotated program of two layers, and which of its ops are alike."""
    model, args = build(config, batch, tensor_dtype(dtype))
    program = annotate(capture(model, args, {}))
    return program, fold(program).class_of


@lru_cache(maxsize=4096)
def parts_of(
    config: TransformerConfig,
    batch: int,
    dtype: str,
    name: str,
    tp: int,
    fused: bool,
    link_name: str,
    narrow: str = "",
    sequence: bool = True,
) -> tuple[Part, Part]:
    """Return one layer and the rest, on each of ``tp`` devices.

    Args:
        config: the model, of two layers.
        batch: sequences.
        dtype: of parameters and activations; ``tfloat32`` is float32 whose products run in TF32.
        name: of the device.
        tp: tensor-parallel ranks.
        fused: chains of pointwise ops run as one kernel.
        link_name: the link between those ranks.
        sequence: norms and residuals are split over those ranks too; else every rank computes all of them.
        narrow: the dtype of products inside layers where it is another one: 8 or 4 bits.
    """
    program, classes = captured(config, batch, dtype)
    mesh = Mesh((tp,), ("model",), name, (link_name,))
    prices = dataclasses.replace(Prices.of(mesh), device=computing(name, dtype))
    choices: dict[str, tuple[str, ...]] = {}
    layouts: dict[str, str] = {}
    seconds: Seconds = defaultdict(float)
    if tp > 1:
        constraints = {**MEGATRON, **(GATE if config.gated else {})}
        if not config.ffn:
            constraints = {at: split for at, split in constraints.items() if ".mlp." not in at}
        plan = make_plan(program, mesh, Options(constraints=constraints, optimizer="adamw"))
        choices, layouts = dict(plan.choices), dict(plan.parameters)
        nodes = program.nodes()
        for row in plan.collectives:
            seconds[_in_layer(nodes[row.tensor]), row.phase, "moves"] += row.seconds
        if not sequence:
            choices |= {node.name: ("replicate",) for node in program.ops() if _residual(node)}
    small = computing(name, narrow) if narrow else None
    tally(seconds, program, classes, prices, small, fused=fused, vocab=config.vocab, choices=choices, tp=tp)
    return parts_from(seconds, _sizes(program, layouts, tp))


def tally(
    seconds: Seconds,
    program: Program,
    classes: dict[str, str],
    prices: Prices,
    narrow: Device | None,
    *,
    fused: bool,
    vocab: int = 0,
    choices: Mapping[str, tuple[str, ...]] | None = None,
    tp: int = 1,
) -> None:
    """Add up the seconds of every op of an annotated program: by whether it is in a layer, by half and by kind.

    Args:
        seconds: what is added to.
        program: of two layers.
        classes: which of its ops are alike.
        prices: of the mesh.
        narrow: the device as it computes products of 8 or 4 bits, where layers do.
        fused: chains of pointwise ops run as one kernel.
        vocab: number of logits, by which the loss is told.
        choices: what the tensor-parallel axis does to every op; all whole without.
        tp: its ranks.
    """
    mark_traffic(program, classes)
    if not fused:
        for node in program.ops():
            del node.meta["traffic"]
    table = StrategyTable(prices)
    narrowed = StrategyTable(dataclasses.replace(prices, device=narrow or prices.device))
    for node in program.ops():
        strategies = table.strategies(node)
        at = 0
        if choices:
            at = [choice_names(node.meta["rule"], row) for row in strategies.choices].index(choices[node.name])
        key = (_in_layer(node), node.meta["phase"])
        kind = _kind(node, vocab)
        seconds[(*key, kind)] += float(strategies.seconds[at])
        seconds[(*key, "launches")] += 0.0 if is_view(node.target) else node.meta.get("traffic", ALONE).launches
        if narrow and kind == "products" and key[0]:
            seconds[(*key, "narrow")] += float(narrowed.strategies(node).seconds[at])
            seconds[(*key, "wide")] += float(strategies.seconds[at])
            num_bytes = sum(operand.meta["val"].nbytes for operand in tensor_operands(node))
            seconds[(*key, "casts")] += num_bytes / tp / prices.device.stream_bytes_per_s


def _sizes(program: Program, layouts: dict[str, str], tp: int) -> dict[bool, float]:
    """Return the number of parameters of a rank, inside layers and outside; split products store split weights."""
    sizes: dict[bool, float] = defaultdict(float)
    for role in program.inputs:
        if role.kind == "parameter":
            numel = program.nodes()[role.node].meta["val"].numel()
            owner, _, kind = role.name.rpartition(".")
            split = kind == "weight" and re.sub(r"\.\d+\.", ".*.", owner) in {**MEGATRON, **GATE}
            split = split or "S" in layouts.get(role.name, "R")
            sizes[role.name.startswith("layers.")] += numel / (tp if split else 1)
    return sizes


def parts_from(seconds: Seconds, sizes: Mapping[bool, float]) -> tuple[Part, Part]:
    """Return one layer of two, and the rest, of what was tallied and of the parameters of both."""
    kinds = [field.name for field in dataclasses.fields(Half)]
    out = []
    for inside, count in ((True, 2), (False, 1)):
        forward, backward = (
            Half(**{kind: seconds[inside, phase, kind] / count for kind in kinds}) for phase in ("forward", "backward")
        )
        out.append(Part(forward, backward, sizes.get(inside, 0.0) / count))
    return out[0], out[1]


def _kind(node: fx.Node, vocab: int) -> str:
    if node.target is torch.ops.autopar.contract.default:
        return "products"
    if node.target in (torch.ops.autopar.attention.default, torch.ops.autopar.attention_backward.default):
        return "attention"
    logits = any(vocab in operand.meta["val"].shape for operand in tensor_operands(node))
    return "loss" if logits and not node.meta.get("module") else "streams"


def _residual(node: fx.Node) -> bool:
    """Tell whether an op works on the stream of tokens between the split parts of layers."""
    return node.target is not torch.ops.autopar.contract.default and bool(RESIDUAL.search(str(node.meta["module"])))


def _in_layer(node: Any) -> bool:
    return str(node.meta.get("module", "")).startswith("layers.")


def computing(name: str, dtype: str) -> Device:
    """Return the device as it computes in ``dtype``, where that is not the dtype of the tensors.

    Products of float32 run in TF32 where a run says so; those of 16 bits in 8 or 4 where it says that.
    """
    profile = device(name)
    if dtype not in profile.peak_flops or dtype in ("bfloat16", "float16", "float32"):
        return profile
    rate = profile.peak_flops[dtype]
    shown = ("float32",) if dtype == "tfloat32" else ("bfloat16", "float16")
    return dataclasses.replace(profile, peak_flops={**profile.peak_flops, **dict.fromkeys(shown, rate)})
