"""Published training runs: one record a row, or the reason why a row can't be predicted (never its error)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.passes.cost.devices import device
from benchmarks import run_software as software
from benchmarks.models.transformer import TransformerConfig
from benchmarks.run_experts import (
    Experts,
    active_weights,
    dense_weights,
    expert_weights,
    latent_of,
    layers_ahead,
    read_experts,
)
from benchmarks.run_rules import SkippedError, check_scope, check_types, micro_batches, step_seconds

DEVICES: dict[str, tuple[str, str]] = {
    "V100-SXM2-16GB": ("v100-16gb", "volta"),
    "V100-SXM2-32GB": ("v100-32gb", "volta"),
    "V100-PCIe": ("v100-pcie", "volta"),
    "T4": ("t4", "volta"),
    "A100-SXM-40GB": ("a100-40gb", "ampere"),
    "A100-SXM-80GB": ("a100", "ampere"),
    "A100-PCIe-40GB": ("a100-pcie-40gb", "ampere"),
    "A100-PCIe-80GB": ("a100-pcie", "ampere"),
    "A800-SXM-80GB": ("a800", "ampere"),
    "A10G": ("a10g", "ampere"),
    "RTX 3090": ("rtx3090", "ampere"),
    "RTX 4090": ("rtx4090", "ampere"),
    "L4": ("l4", "ampere"),
    "L40S": ("l40s", "ampere"),
    "H100-SXM-80GB": ("h100", "hopper"),
    "H100-PCIe-80GB": ("h100-pcie", "hopper"),
    "H100-96GB-HBM2e": ("h100-96gb", "hopper"),
    "H800-SXM-80GB": ("h800", "hopper"),
    "H200-SXM-141GB": ("h200", "hopper"),
    "MI300X": ("mi300x", "cdna"),
    "B200-SXM": ("b200", "blackwell"),
    "B300-SXM": ("b300", "blackwell"),
    "GB200": ("gb200", "blackwell"),
    "GB300": ("gb300", "blackwell"),
}
"""Name of the GPU in a row -> device profile and the generation of its kernels."""

VOCAB = {"bert": 30528, "gpt": 50304, "llama": 32000}
"""Vocabularies of rows that state none."""

ROOM = 1.04
"""The part of a device's memory up to which a run fits by the estimate: Composer's runs (a fitted source) that need no
more are as fast as their neighbours, those that need a little more often two to three times slower."""

AHEAD = 8
"""Layers that ZeRO-3 gathers ahead of use where nothing limits that: the host is far ahead of the device."""

BUFFERS = 1.5e9
"""Bytes of the libraries' context and of the collectives' buffers."""

SURELY = 1.5
"""A row that does not speak of recomputation did it when the activations need more than so many times the memory."""


@dataclass(frozen=True)
class Run:
    """What a row says of its configuration, with documented defaults where it says nothing.

    Attributes:
        model: with two layers and the sequence of one context-parallel rank; how many layers there really are is
            ``layers``. With experts its feed-forward part is that of the shared ones, if any.
        experts: routed ones of its layers, or None.
        dtype: ``bfloat16``, ``float16``, ``float32`` or ``tfloat32``.
        narrow: the dtype of 8 or 4 bits of products inside layers, or empty.
        generation: of the device's kernels: ``volta``, ``ampere``, ``hopper`` or ``blackwell``.
        switched: every device inside a node reaches every other at full speed.
        tp, pp, cp, dp: degrees; ``chunks`` of a stage are run interleaved.
        micro_batch: sequences of a data-parallel replica at once.
        steps: micro-batches a step.
        mixed: by autocast: parameters, norms and the loss in float32.
        lean: norms in 16 bits and a loss of one kernel.
        attention: ``unfused`` (scores and their softmax pass through memory), or the generation of the fused kernel:
            ``first`` (FlashAttention), ``second`` (FlashAttention-2), ``tuned`` (cuDNN, FlashAttention-3).
        fused_kernels: chains of pointwise ops run as one kernel, written by hand or by a compiler.
        compiled: by a compiler, which fuses across norms and residuals as well.
        fused_softmax: scale, mask and softmax of scores that pass through memory are one kernel.
        copies: groups of the data axis that each hold all that ZeRO splits: 1 unless it splits over part of the axis.
        zero: 0 to 3; with stages at most 2: what a stage gathered stays for its other micro-batches.
        recompute: see ``run_software.recomputation``.
        overlaps: gradients (and gathers) travel while the backward goes on.
        overlaps_tensors: so do tensor-parallel transfers.
        early_gathers: ZeRO-3 gathers tensor after tensor.
        unlimited_gathers: ZeRO-3 gathers as far ahead as the host is.
        sequence_parallel: norms and residuals are split over tensor-parallel ranks.
        rowwise: products of 8 bits are scaled row by row.
        block_scales: each block of operands of 8 or 4 bits has its own scale.
        keeps_casts: weights are cast to 8 or 4 bits once a step.
        aligned_only: products of 16 bits use tensor cores only where 8 divides all their dims.
        fused_accumulation: products add to the sum of gradients themselves.
        reduced_bytes, gathered_bytes: of an element of a gradient when it is reduced, of a parameter when gathered.
        network_bits_per_s: of a node, one way; 0 when the row does not say.
        seconds: measured, a step.
    """

    row_id: str
    source: str
    model: TransformerConfig
    experts: Experts | None
    layers: int
    dtype: str
    narrow: str
    device: str
    generation: str
    num_devices: int
    devices_per_node: int
    switched: bool
    tp: int
    pp: int
    cp: int
    dp: int
    chunks: int
    micro_batch: int
    steps: int
    mixed: bool
    lean: bool
    attention: str
    fused_kernels: bool
    compiled: bool
    fused_softmax: bool
    copies: int
    zero: int
    recompute: str
    overlaps: bool
    overlaps_tensors: bool
    early_gathers: bool
    unlimited_gathers: bool
    sequence_parallel: bool
    rowwise: bool
    block_scales: bool
    keeps_casts: bool
    aligned_only: bool
    fused_accumulation: bool
    reduced_bytes: float
    gathered_bytes: float
    network_bits_per_s: float
    seconds: float

    @property
    def shards(self) -> int:
        """Ranks that ZeRO splits over."""
        return self.dp * self.cp // self.copies


def read_run(row: Mapping[str, Any]) -> Run:
    """Return the run of a row.

    Raises:
        SkippedError: a rule leaves it out.
    """
    check_types(row)
    check_scope(row)
    if row.get("gpu_device") not in DEVICES:
        raise SkippedError("device unknown")
    name, generation = DEVICES[row["gpu_device"]]
    tp, pp, cp, dp = _degrees(row)
    micro, steps = micro_batches(row, dp)
    experts = read_experts(row, tp, dp * cp * tp)
    model, dtype = _model(row, experts, padded(int(row["seq_len"]), tp * cp) // cp), software.dtype_of(row)
    if experts is not None:
        experts = replace(experts, ahead=layers_ahead(row, model, experts))
    narrow = software.narrow_dtype(row)
    if narrow and narrow not in device(name).peak_flops:
        raise SkippedError("numbers that its device has no units for")
    per_node = int(row.get("gpus_per_node") or 8)
    run = Run(
        row_id=str(row.get("id", "")),
        source=str(row.get("source_id", "")),
        model=model,
        experts=experts,
        layers=int(row["layers"]) + (experts.ahead if experts else 0),
        dtype=dtype,
        narrow=narrow,
        device=name,
        generation=generation,
        num_devices=int(row["n_gpus"]),
        devices_per_node=per_node,
        switched=generation != "volta" or "switch" in str(row.get("intra_link") or "").lower() or per_node > 8,
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        chunks=int(row.get("vpp") or 1) if pp > 1 else 1,
        micro_batch=micro,
        steps=steps,
        mixed="amp" in str(row.get("dtype", "")).lower(),
        lean=software.lean(row),
        attention=software.attention_kernel(row, generation),
        fused_kernels=software.fused_kernels(row),
        compiled=software.compiled(row),
        fused_softmax=software.fused_softmax(row),
        copies=software.copies(row, dp * cp),
        zero=software.zero_stage(row) if pp == 1 else min(2, software.zero_stage(row)),
        recompute=software.recomputation(row),
        overlaps=software.overlaps(row),
        overlaps_tensors=software.overlaps_tensors(row),
        early_gathers=software.early_gathers(row),
        unlimited_gathers=software.unlimited_gathers(row),
        sequence_parallel=software.sequence_parallel(row),
        rowwise=software.rowwise(row),
        block_scales=software.block_scales(row),
        keeps_casts=software.keeps_casts(row),
        aligned_only=software.aligned_only(row),
        fused_accumulation=software.fused_accumulation(row),
        reduced_bytes=software.reduced_bytes(row, dtype),
        gathered_bytes=software.gathered_bytes(row),
        network_bits_per_s=float(row.get("inter_gbps_per_node") or 0) * 1e9,
        seconds=step_seconds(row, micro * steps * dp),
    )
    return _checked(run, row)


def _degrees(row: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Return the tensor-, pipeline-, context- and data-parallel degrees.

    Raises:
        SkippedError: they do not fit the devices or the model.
    """
    tp, pp, cp = (int(row.get(key) or 1) for key in ("tp", "pp", "cp"))
    devices = int(row["n_gpus"])
    dp = devices // (tp * pp * cp)
    if dp * tp * pp * cp != devices or (row.get("dp") and int(row["dp"]) != dp):
        raise SkippedError("parallel degrees do not multiply to the devices")
    if int(row["heads"]) % tp or padded(int(row["seq_len"]), tp * cp) > 1.01 * row["seq_len"]:
        raise SkippedError("heads or tokens do not divide by their degrees")
    if pp > int(row["layers"]):
        raise SkippedError("more stages than layers")
    return tp, pp, cp, dp


def padded(tokens: int, ranks: int) -> int:
    """Return the length that a sequence is padded to so that its ranks share it evenly."""
    return -(-tokens // ranks) * ranks


def _checked(run: Run, row: Mapping[str, Any]) -> Run:
    """Return the run, all recomputed where a row does not say and it surely was.

    Raises:
        SkippedError: it does not fit by its own facts, or is faster than its devices.
    """
    profile = device(run.device)
    stated = row.get("recompute") is not None
    if not stated and required_bytes(run) > SURELY * profile.memory_bytes:
        run = replace(run, recompute="full")
    if required_bytes(run) > (ROOM if stated else SURELY) * profile.memory_bytes:
        raise SkippedError("does not fit into its devices by its own facts: retries of the allocator are in its time")
    if _least_flops(run) / run.seconds > profile.peak_flops[_unit(run)] * run.num_devices:
        raise SkippedError("claims more flops a second than its devices have at their peak")
    return run


def required_bytes(run: Run) -> float:
    """Return the bytes of a rank: parameters, gradients, Adam's state, activations, the loss, gathered layers.

    Activations are counted as in Korthikanti et al., arXiv:2205.05198, section 4: 34 bytes a token and channel (half
    as many again under autocast with norms in float32, 20 when operands are saved in 8 bits), 5 a score when attention
    is not fused, 2 a layer when all is recomputed. Of the loss, ten bytes a logit, four in one kernel. Of what ZeRO-3
    gathers, two layers, those ahead where nothing limits them, the gradient of one with its copy in the dtype of the
    reduction, and the embedding. Routed experts have their own data-parallel ranks; instead of the 19 bytes of a plain
    feed-forward part, a token has for each of its experts what goes in and what its two products make and take.
    """
    model = run.model
    stage = -(-run.layers // run.pp)
    parameters = (stage * dense_weights(model) + model.vocab * model.hidden) / run.tp
    per_parameter = _bytes_of_parameter(run, run.shards)
    tokens = run.micro_batch * model.sequence
    scores = 5.0 * model.heads * model.sequence / model.hidden if run.attention == "unfused" else 0.0
    channel = 20.0 if run.narrow else 51.0 if run.mixed and not run.lean else 34.0
    layer = channel + (scores if run.recompute == "none" else 0.0)
    total = 0.0
    if run.experts is not None:
        experts = run.experts
        weights = experts.local * expert_weights(model, experts) / experts.etp
        total += _bytes_of_parameter(run, expert_replicas(run)) * stage * weights
        inside = (experts.shared + experts.top_k * experts.ffn) / model.hidden
        layer += (5.0 if run.narrow else 6.0) * inside + experts.top_k * (1.0 if run.narrow else 2.0)
        layer -= 11.0 if run.narrow else 19.0
    in_flight = min(run.steps, run.pp) * (1.0 + (run.pp - 1) / (run.pp * run.chunks) if run.chunks > 1 else 1.0)
    kept = layer + 2.0 * stage * in_flight if run.recompute == "full" else layer * stage * in_flight
    logits = (4.0 if run.lean else 10.0) * tokens * model.vocab * (1.0 if model.causal else 5 / 32)
    if run.zero == 3:
        copies = 2.0 + (4.0 if run.reduced_bytes > 2 else 0.0)
        ahead = 2.0 * AHEAD if run.unlimited_gathers else 0.0
        total += (4.0 + copies + ahead) * dense_weights(model) + (2.0 + copies) * model.vocab * model.hidden
    return total + per_parameter * parameters + (tokens * model.hidden * kept + logits) / run.tp + BUFFERS


def _bytes_of_parameter(run: Run, ranks: int) -> float:
    """Return the bytes that a parameter takes on a rank with its gradient and Adam's state, under the run's ZeRO."""
    return {0: 18.0, 1: 6.0 + 12.0 / ranks, 2: 4.0 + 14.0 / ranks, 3: 18.0 / ranks}[run.zero]


def expert_replicas(run: Run) -> int:
    """Return how many ranks hold the same experts of the same layers, and reduce their gradients with each other."""
    assert run.experts is not None
    return run.dp * run.cp * run.tp // (run.experts.ep * run.experts.etp)


def _unit(run: Run) -> str:
    known = device(run.device).peak_flops
    return run.narrow or (run.dtype if run.dtype in known else "float32")


def _least_flops(run: Run) -> float:
    """Return the flops that a step takes at least: six for each weight that a token meets in layers, and each token."""
    weights, model = active_weights(run.model, run.experts, run.layers), run.model
    return 6.0 * weights * run.micro_batch * run.steps * run.dp * model.sequence * run.cp


def _model(row: Mapping[str, Any], experts: Experts | None, sequence: int) -> TransformerConfig:
    hidden, heads = int(row["hidden"]), int(row["heads"])
    family = " ".join(str(row.get(key) or "") for key in ("family", "model")).lower()
    gated = bool(row.get("gated_mlp"))
    causal = "bert" not in family
    kv_heads = int(row.get("kv_heads") or heads)
    channels = int(row.get("head_dim") or hidden // heads)
    latent = latent_of(row)
    if latent is not None:
        channels, kv_heads = latent[1], heads
    modern = (gated or kv_heads != heads or latent is not None) and causal
    if heads % kv_heads or channels < 1 or (modern and channels % 2):
        raise SkippedError("heads or tokens do not divide by their degrees")
    default = 8 * hidden // 3 if gated else 4 * hidden
    return TransformerConfig(
        layers=2,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        channels=channels,
        ffn=experts.shared if experts else int(row.get("ffn") or default),
        vocab=int(row.get("vocab") or VOCAB["llama" if modern else "gpt" if causal else "bert"]),
        sequence=sequence,
        gated=gated,
        causal=causal,
        rms_norm=modern,
        rotary=modern,
        tied=bool(row.get("tied_embeddings", not modern)),
        latent=latent[0] if latent else None,
    )
