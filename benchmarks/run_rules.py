"""Rules that leave a published row out: by what it says or does not say, never by its error. Each is counted."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]

NEEDED = ("layers", "hidden", "heads", "seq_len", "n_gpus", "gbs")
COUNTS = (*NEEDED, "kv_heads", "head_dim", "ffn", "vocab", "mbs", "grad_accum", "tp", "pp", "cp", "dp", "vpp")
EXPERTS = ("n_experts", "top_k", "moe_ffn", "n_shared_experts", "dense_layers", "ep", "etp")
TIMES = ("iter_s", "samples_per_s", "tokens_per_s", "tokens_per_s_per_gpu")
OTHER_FAMILIES = re.compile(r"t5\b|resnet|\bvit\b|diffusion|mamba|hybrid|nemotron-?h|\bunet")
OTHER_ATTENTION = re.compile(
    r"\bmla\b(?!\(q_lora \d+, kv_lora \d+, qk_nope \d+, qk_rope \d+, v \d+)|linear|sliding|window|local"
)
"""Attention that is not modelled: latent one without its widths, and what sees part of the tokens."""

ENCODER_SEQUENCE = 128
"""Up to this length batches of pairs of sentences are taken to be full."""


class SkippedError(Exception):
    """A row that can't be predicted; the message is the rule that says so."""


def check_types(row: Row) -> None:
    """Refuse figures that are no positive numbers, and counts that are no whole ones."""
    for key in (*COUNTS, *EXPERTS, *TIMES, "tflops_per_gpu", "gpus_per_node", "inter_gbps_per_node"):
        value = row.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise SkippedError("a figure is no positive number")
        if key in (*COUNTS, *EXPERTS) and value != int(value):
            raise SkippedError("a count is no whole number")


def check_scope(row: Row) -> None:
    """Refuse what the benchmark does not model, and rows whose facts are too thin.

    Raises:
        SkippedError: the first rule that applies.
    """
    name = " ".join(str(row.get(key, "")) for key in ("model", "family")).lower()
    text = " ".join(str(row.get(key, "")) for key in ("model", "family", "table", "notes", "finetune", "gpu")).lower()
    source = " ".join(str(row.get(key, "")) for key in ("source_id", "source_kind")).lower()
    guessed = row.get("unverified_fields") or ()
    stated = any(row.get(key) for key in ("tp", "dp", "pp"))
    rules = (
        (row.get("oom"), "out of memory: nothing was measured"),
        (row.get("verified") is False, "a row from memory, not read from its source"),
        (not _no(row.get("offload")), "offloads to the host"),
        (re.search(r"\blora\b|qlora", f"{text} {source}"), "trains adapters only"),
        (OTHER_FAMILIES.search(name), "no plain decoder or encoder"),
        (OTHER_ATTENTION.search(str(row.get("attention") or "").lower()), "other attention"),
        (re.search("unpadded|packed|variable length|binning", text), "sequences are shorter than it says"),
        (_encoder(row) and not _padded(row, text), "an encoder's sequences, without a word on their padding"),
        ("modified per run" in str(row.get("framework", "")), "its code was changed from run to run"),
        (re.search("power.limited|capped", text), "device limited below its data sheet"),
        (re.search("variance up to|shared machine", text), "its authors warn that repeats differ"),
        (re.search(r"\bci\b", source), "a correctness run whose time is not tuned"),
        ("gpu" in guessed, "its device is a guess"),
        ("seq_len inferred" in text, "its sequence length is a guess"),
        (any(not row.get(key) for key in NEEDED), "lacks layers, hidden, heads, seq_len, n_gpus or gbs"),
        (row["n_gpus"] != 1 and not stated, "states no parallel degrees") if row.get("n_gpus") else (False, ""),
    )
    for applies, reason in rules:
        if applies:
            raise SkippedError(reason)


def _no(value: Any) -> bool:
    """Tell whether a text says that there is none; a ratio of 0 says so too."""
    text = str(value or "none").lower()
    return text in ("none", "false", "no") or re.search(r"alpha=0(\.0+)?$", text) is not None


def _encoder(row: Row) -> bool:
    name = " ".join(str(row.get(key) or "") for key in ("family", "model")).lower()
    length = row.get("seq_len")
    return "bert" in name and isinstance(length, (int, float)) and length > ENCODER_SEQUENCE


def _padded(row: Row, text: str) -> bool:
    return "padded" in text and "unpadded" not in text


def step_seconds(row: Row, sequences: float) -> float:
    """Return the measured seconds of a step.

    Args:
        row: published.
        sequences: in a step, as its degrees and micro-batches make it; what is printed may be rounded.

    Raises:
        SkippedError: the row states no time, or times that contradict each other by more than a tenth.
    """
    tokens = sequences * row["seq_len"]
    found = [
        value
        for value in (
            row.get("iter_s"),
            sequences / row["samples_per_s"] if row.get("samples_per_s") else None,
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


def micro_batches(row: Row, replicas: int) -> tuple[int, int]:
    """Return the sequences of a micro-batch and their number in a step, on each data-parallel replica.

    The printed global batch may be rounded, by less than one micro-batch of each replica and
    no more than a tenth.

    Raises:
        SkippedError: sizes contradict each other, or pipelined rows state none.
    """
    total, micro, steps = float(row["gbs"]), float(row.get("mbs") or 0), float(row.get("grad_accum") or 0)
    share = total / replicas
    if not micro and not steps:
        if (row.get("pp") or 1) > 1:
            raise SkippedError("needs stages and states no micro-batch")
        micro, steps = share, 1
    elif not micro:
        micro = share / steps
    elif not steps:
        steps = max(1, round(share / micro))
    off = abs(micro * steps * replicas - total)
    if micro < 1 or micro != int(micro) or off >= max(1, micro * replicas) or off > 0.1 * total:
        raise SkippedError("batch sizes contradict each other")
    if steps < (row.get("pp") or 1) and not row.get("grad_accum"):
        raise SkippedError("fewer micro-batches than stages by its sizes, without a word on it")
    return int(micro), int(steps)
