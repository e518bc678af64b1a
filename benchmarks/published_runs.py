"""Published training runs: one record a row, or the reason why a row can't be predicted (never its error)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.passes.cost.devices import device
from benchmarks.models.transformer import TransformerConfig

DEVICES: dict[str, str] = {
    "V100-SXM2-16GB": "v100-16gb",
    "V100-SXM2-32GB": "v100-32gb",
    "A100-SXM-40GB": "a100-40gb",
    "A100-SXM-80GB": "a100",
    "H100-SXM-80GB": "h100",
    "H100-PCIe-80GB": "h100-pcie",
    "H100-96GB-HBM2e": "h100-96gb",
    "H200-SXM-141GB": "h200",
    "B200-SXM": "b200",
    "GB200": "gb200",
    "GB300": "gb300",
    "L4": "l4",
    "L40S": "l40s",
    "T4": "t4",
    "RTX 4090": "rtx4090",
    "MI300X": "mi300x",
}
"""Name of the GPU in a row -> device profile."""

NEEDED = ("layers", "hidden", "heads", "seq_len", "n_gpus", "gbs")
FLASH_SINCE = "2022-09"
"""Frameworks use fused attention from here on when a row does not say."""

SECOND_FLASH_SINCE = "2023-08"
"""Frameworks use FlashAttention-2 from here on."""

TUNED = re.compile("megatron|nemo|bridge|transformer.?engine")
"""Frameworks that use cuDNN's attention on Hopper and later."""

FUSING = re.compile("megatron|nemo|bridge|transformer.?engine|deepspeed|apex|alpa|xla|jax|oneflow|compile|mlperf")
"""Frameworks with fused pointwise kernels, by hand or by a compiler; others run op by op unless a row says more."""

AMPERE_AND_OLDER = ("V100-SXM2-16GB", "V100-SXM2-32GB", "T4", "A100-SXM-40GB", "A100-SXM-80GB")

VOCAB = {"bert": 30528, "gpt": 50304, "llama": 32000}
"""Vocabularies of rows that state none."""


@dataclass(frozen=True)
class Run:
    """What a row says of its configuration, with documented defaults where it says nothing.

    Attributes:
        model: with two layers; how many there really are is ``layers``.
        dtype: ``bfloat16``, ``float16``, ``float32`` or ``tfloat32``.
        micro_batch: sequences of a data-parallel rank at once.
        steps: micro-batches a step.
        mixed: by autocast: parameters, norms and the loss in float32.
        attention: ``unfused`` (scores and their softmax pass through memory), or the generation of the fused kernel:
            ``first`` (FlashAttention), ``second`` (FlashAttention-2), ``ported`` (the same on Hopper and later),
            ``tuned`` (cuDNN, FlashAttention-3).
        fused_kernels: chains of pointwise ops run as one kernel, written by hand or by a compiler.
        zero: 0 to 3.
        recompute: ``none``, ``attention``, ``ops`` (every second product and all but attention) or ``full``.
        overlaps: gradients (and gathers) travel while the backward goes on.
        network_bits_per_s: of a node, one way; 0 when the row does not say.
        seconds: measured, a step.
    """

    row_id: str
    source: str
    model: TransformerConfig
    layers: int
    dtype: str
    device: str
    num_devices: int
    devices_per_node: int
    tp: int
    dp: int
    micro_batch: int
    steps: int
    mixed: bool
    attention: str
    fused_kernels: bool
    zero: int
    recompute: str
    overlaps: bool
    network_bits_per_s: float
    seconds: float


class SkippedError(Exception):
    """A row that can't be predicted; the message is the rule that says so."""


def read_run(row: Mapping[str, Any]) -> Run:
    """Return the run of a row.

    Raises:
        SkippedError: a rule leaves it out.
    """
    _check_scope(row)
    seconds = step_seconds(row)
    tp, devices = int(row.get("tp") or 1), int(row["n_gpus"])
    dp = devices // tp
    if dp * tp != devices or (row.get("dp") and int(row["dp"]) != dp):
        raise SkippedError("parallel degrees do not multiply to the devices")
    micro, steps = _micro_batch(row, dp)
    if row["heads"] % tp:
        raise SkippedError("heads do not divide by the tensor-parallel degree")
    run = Run(
        row_id=str(row.get("id", "")),
        source=str(row.get("source_id", "")),
        model=_model(row),
        layers=int(row["layers"]),
        dtype=_dtype(row),
        device=DEVICES[row["gpu_device"]],
        num_devices=devices,
        devices_per_node=int(row.get("gpus_per_node") or 8),
        tp=tp,
        dp=dp,
        micro_batch=micro,
        steps=steps,
        mixed="amp" in str(row.get("dtype", "")).lower(),
        attention=_attention(row),
        fused_kernels=_fused_kernels(row),
        zero=_zero(row),
        recompute=_recompute(row),
        overlaps=_overlaps(row),
        network_bits_per_s=float(row.get("inter_gbps_per_node") or 0) * 1e9,
        seconds=seconds,
    )
    memory_bytes = device(run.device).memory_bytes
    if row.get("recompute") is None and required_bytes(run) > memory_bytes:
        run = replace(run, recompute="full")
    if required_bytes(run) > memory_bytes:
        raise SkippedError("does not fit into its devices by its own facts: retries of the allocator are in its time")
    if _least_flops(run) / seconds > device(run.device).peak_flops[_unit(run)] * devices:
        raise SkippedError("claims more flops a second than its devices have at their peak")
    return run


def required_bytes(run: Run) -> float:
    """Return the bytes of a rank: parameters, gradients, Adam's state, activations, the loss, gathered layers.

    Activations are counted as in Korthikanti et al., arXiv:2205.05198, section 4: 34 bytes a token and channel (half
    as many again under autocast), 5 a score when attention is not fused, 2 a layer when all is recomputed. Of the
    loss, ten bytes a logit; of gathered parameters, two layers.
    """
    model = run.model
    parameters = (run.layers * _layer_weights(model) + model.vocab * model.hidden) / run.tp
    per_parameter = {0: 18.0, 1: 6.0 + 12.0 / run.dp, 2: 4.0 + 14.0 / run.dp, 3: 18.0 / run.dp}[run.zero]
    tokens = run.micro_batch * model.sequence
    scores = 5.0 * model.heads * model.sequence / model.hidden if run.attention == "unfused" else 0.0
    layer = 34.0 * (1.5 if run.mixed else 1.0) + scores
    kept = layer + 2.0 * run.layers if run.recompute == "full" else layer * run.layers
    logits = 10.0 * tokens * model.vocab * (1.0 if model.causal else 5 / 32)
    gathered = 4.0 * _layer_weights(model) if run.zero == 3 else 0.0
    return per_parameter * parameters + (tokens * model.hidden * kept + logits) / run.tp + gathered


def _layer_weights(model: TransformerConfig) -> int:
    width = model.channels * (2 * model.heads + 2 * model.kv_heads)
    return model.hidden * (width + (3 if model.gated else 2) * model.ffn)


def _unit(run: Run) -> str:
    known = device(run.device).peak_flops
    return run.dtype if run.dtype in known else "float32"


def _least_flops(run: Run) -> float:
    """Return the flops that a step takes at least: six for each weight of the layers' products and each token."""
    weights, model = run.layers * _layer_weights(run.model), run.model
    return 6.0 * weights * run.micro_batch * run.steps * run.dp * model.sequence


def _check_scope(row: Mapping[str, Any]) -> None:
    name = " ".join(str(row.get(key, "")) for key in ("model", "family")).lower()
    text = " ".join(str(row.get(key, "")) for key in ("model", "family", "table", "notes", "finetune")).lower()
    rules = (
        (row.get("oom"), "out of memory: nothing was measured"),
        ((row.get("pp") or 1) > 1, "needs pipeline stages"),
        (row.get("n_experts"), "mixture of experts"),
        (row.get("fp8") or re.search("fp8|fp4|mxfp", str(row.get("dtype", "")).lower()), "numbers of 8 or 4 bits"),
        ((row.get("cp") or 1) > 1, "context parallel"),
        (str(row.get("offload") or "none").lower() not in ("none", "false", "no"), "offloads to the host"),
        (re.search(r"\blora\b|qlora", text + str(row.get("source_id", "")).lower()), "trains adapters only"),
        (re.search(r"\bt5\b|mt5|resnet|\bvit\b|diffusion|mamba|hybrid", name), "no plain decoder or encoder"),
        (re.search("unpadded|packed|variable length", text), "sequences are shorter than it says"),
        ("modified per run" in str(row.get("framework", "")), "its code was changed from run to run"),
        ("power limited" in text, "device limited below its data sheet"),
        ("ci " in str(row.get("source_kind", "")).lower() + " ", "a correctness run whose time is not tuned"),
        (any(not row.get(key) for key in NEEDED), "lacks layers, hidden, heads, seq_len, n_gpus or gbs"),
        (row.get("gpu_device") not in DEVICES, "device unknown"),
        (row.get("n_gpus") != 1 and not row.get("tp") and not row.get("dp"), "states no parallel degrees"),
    )
    for applies, reason in rules:
        if applies:
            raise SkippedError(reason)


def step_seconds(row: Mapping[str, Any]) -> float:
    """Return the measured seconds of a step.

    Raises:
        SkippedError: the row states no time, or times that contradict each other by more than a tenth.
    """
    tokens = row["gbs"] * row["seq_len"]
    found = [
        value
        for value in (
            row.get("iter_s"),
            row["gbs"] / row["samples_per_s"] if row.get("samples_per_s") else None,
            tokens / row["tokens_per_s"] if row.get("tokens_per_s") else None,
            tokens / (row["tokens_per_s_per_gpu"] * row["n_gpus"]) if row.get("tokens_per_s_per_gpu") else None,
        )
        if value
    ]
    if not found:
        raise SkippedError("states no time")
    if max(found) > 1.1 * min(found):
        raise SkippedError("states times that contradict each other")
    return float(found[0])


def _micro_batch(row: Mapping[str, Any], dp: int) -> tuple[int, int]:
    share = row["gbs"] / dp
    steps = row.get("grad_accum") or (share / row["mbs"] if row.get("mbs") else 1)
    micro = row.get("mbs") or share / steps
    count = round(share / micro) if micro >= 1 else 0
    if count < 1 or micro != int(micro) or count * micro != share or (row.get("grad_accum") or count) != count:
        raise SkippedError("batch sizes contradict each other")
    return int(micro), count


def _model(row: Mapping[str, Any]) -> TransformerConfig:
    hidden, heads = int(row["hidden"]), int(row["heads"])
    family = str(row.get("family") or row.get("model") or "").lower()
    gated = bool(row.get("gated_mlp"))
    causal = "bert" not in family
    grouped = int(row.get("kv_heads") or row["heads"]) != int(row["heads"])
    modern = (gated or grouped) and causal
    default = 8 * hidden // 3 if gated else 4 * hidden
    return TransformerConfig(
        layers=2,
        hidden=hidden,
        heads=heads,
        kv_heads=int(row.get("kv_heads") or heads),
        channels=int(row.get("head_dim") or hidden // heads),
        ffn=int(row.get("ffn") or default),
        vocab=int(row.get("vocab") or VOCAB["llama" if modern else "gpt" if causal else "bert"]),
        sequence=int(row["seq_len"]),
        gated=gated,
        causal=causal,
        rms_norm=modern,
        rotary=modern,
        tied=bool(row.get("tied_embeddings", not modern)),
    )


def _attention(row: Mapping[str, Any]) -> str:
    stated, date = row.get("flash_attn"), str(row.get("date") or "9")
    fused = bool(stated) if stated is not None else date >= FLASH_SINCE
    if not fused:
        return "unfused"
    if row["gpu_device"] not in AMPERE_AND_OLDER:
        tuned = date >= "2024" and TUNED.search(str(row.get("framework") or "").lower())
        return "tuned" if tuned else "ported"
    return "second" if date >= SECOND_FLASH_SINCE else "first"


def _fused_kernels(row: Mapping[str, Any]) -> bool:
    if row.get("compile") is not None:
        return bool(row["compile"])
    return bool(FUSING.search(str(row.get("framework") or "").lower()))


def _dtype(row: Mapping[str, Any]) -> str:
    text = str(row.get("dtype") or "bf16").lower()
    for word, dtype in (("bf16", "bfloat16"), ("fp16", "float16"), ("tf32", "tfloat32"), ("fp32", "float32")):
        if word in text:
            return dtype
    return "bfloat16"


def _zero(row: Mapping[str, Any]) -> int:
    stage = row.get("zero_stage")
    if stage is not None:
        return int(stage)
    return 3 if row.get("fsdp") else 1 if row.get("distributed_optimizer") else 0


def _recompute(row: Mapping[str, Any]) -> str:
    text = str(row.get("recompute") or "none").lower()
    if text.startswith("none") or text == "false":
        return "none"
    if text.startswith("full"):
        return "full"
    return "ops" if re.search(r"\bop\b|op-level|per-op|sac|budget", text) else "attention"


def _overlaps(row: Mapping[str, Any]) -> bool:
    """Tell whether gradients travel during the backward: all but Megatron before its overlapped optimizer of 2023."""
    megatron = "megatron" in str(row.get("framework") or "").lower()
    return not (megatron and str(row.get("date") or "9") < "2023-06" and _zero(row) < 3)
