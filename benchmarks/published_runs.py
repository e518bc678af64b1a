"""Published training runs: one record a row, or the reason why a row can't be predicted (never its error)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
        zero: 0 to 3.
        recompute: ``none``, ``selective`` or ``full``.
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
    return Run(
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
        zero=_zero(row),
        recompute=_recompute(row),
        overlaps=_overlaps(row),
        network_bits_per_s=float(row.get("inter_gbps_per_node") or 0) * 1e9,
        seconds=seconds,
    )


def _check_scope(row: Mapping[str, Any]) -> None:
    text = " ".join(str(row.get(key, "")) for key in ("model", "family", "table", "notes", "finetune")).lower()
    rules = (
        (row.get("oom"), "out of memory: nothing was measured"),
        ((row.get("pp") or 1) > 1, "needs pipeline stages"),
        (row.get("n_experts"), "mixture of experts"),
        (row.get("fp8") or re.search("fp8|fp4|mxfp", str(row.get("dtype", "")).lower()), "numbers of 8 or 4 bits"),
        ((row.get("cp") or 1) > 1, "context parallel"),
        (str(row.get("offload") or "none").lower() not in ("none", "false", "no"), "offloads to the host"),
        (re.search(r"\blora\b|qlora", text + str(row.get("source_id", "")).lower()), "trains adapters only"),
        (re.search(r"\bt5\b|mt5|resnet|\bvit\b|diffusion|mamba|hybrid|wide", text), "no plain decoder or encoder"),
        (re.search("unpadded|packed|variable length", text), "sequences are shorter than it says"),
        ("ci " in str(row.get("source_kind", "")).lower() + " ", "a correctness run whose time is not tuned"),
        (any(not row.get(key) for key in NEEDED), "lacks layers, hidden, heads, seq_len, n_gpus or gbs"),
        (row.get("gpu_device") not in DEVICES, "device unknown"),
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
    if micro < 1 or micro != int(micro) or abs(micro * steps - share) > 1e-6 * share:
        raise SkippedError("batch sizes contradict each other")
    return int(micro), round(share / micro)


def _model(row: Mapping[str, Any]) -> TransformerConfig:
    hidden, heads = int(row["hidden"]), int(row["heads"])
    family = str(row.get("family") or row.get("model") or "").lower()
    gated = bool(row.get("gated_mlp"))
    causal = "bert" not in family
    grouped = int(row.get("kv_heads") or row["heads"]) != int(row["heads"])
    modern = (gated or grouped) and causal
    fused = row.get("flash_attn")
    if fused is None:
        fused = str(row.get("date") or "") >= FLASH_SINCE
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
        fused_attention=bool(fused) or modern,
        tied=bool(row.get("tied_embeddings", not modern)),
    )


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
    return "full" if text.startswith("full") else "selective"


def _overlaps(row: Mapping[str, Any]) -> bool:
    """Tell whether gradients travel during the backward: all but Megatron before its overlapped optimizer of 2023."""
    megatron = "megatron" in str(row.get("framework") or "").lower()
    return not (megatron and str(row.get("date") or "9") < "2023-06" and _zero(row) < 3)
