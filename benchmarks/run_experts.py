"""What a published row says of its experts: sizes, degrees, and the software that moves and multiplies their rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.models.transformer import Latent, TransformerConfig
from benchmarks.run_rules import SkippedError
from benchmarks.run_software import date_of, framework_of

Row = Mapping[str, Any]

LATENT = re.compile(r"mla\(q_lora (\d+), kv_lora (\d+), qk_nope (\d+), qk_rope (\d+), v (\d+)")
"""How rows write the widths of latent attention."""

ONCE_A_NODE = re.compile("deepep|hybridep")
"""Dispatchers that send a token once to each rank, and over the network once to each node, however many experts it has
there."""


@dataclass(frozen=True)
class Experts:
    """Routed experts of a model and how a run spreads them.

    Attributes:
        num: experts of a layer.
        top_k: experts of a token.
        ffn: width inside one.
        shared: width inside the shared experts, which every token passes through.
        dense_layers: how many of the first layers have a plain feed-forward part, of width ``dense_ffn``.
        ep: ranks that share the experts of a layer.
        etp: ranks that share each of them, by columns and rows.
        once: a token travels once to each rank and once to each node; else once to each of its experts.
        overlaps: rows travel while another micro-batch computes.
        fused: products of all experts, their activations and casts are few kernels; else some for each expert.
        graphed: the host launches graphs, not kernels, and waits for no counts of rows.
        ahead: layers that predict tokens farther ahead, each with the loss once more.
    """

    num: int
    top_k: int
    ffn: int
    shared: int
    dense_layers: int
    dense_ffn: int
    ep: int
    etp: int
    once: bool = False
    overlaps: bool = False
    fused: bool = False
    graphed: bool = False
    ahead: int = 0

    @property
    def local(self) -> int:
        """Experts of a rank."""
        return self.num // self.ep


def latent_of(row: Row) -> tuple[Latent, int] | None:
    """Return the widths of a row's latent attention and the channels of a head's keys, or None."""
    found = LATENT.search(str(row.get("attention") or "").lower())
    if found is None:
        return None
    query, key_value, plain, rotated, value = (int(text) for text in found.groups())
    return Latent(query, key_value, rotated, value), plain + rotated


def read_experts(row: Row, tp: int, replicas: int) -> Experts | None:
    """Return what a row says of its experts; None for a model without.

    Args:
        row: published.
        tp: tensor-parallel ranks.
        replicas: ranks of a stage, all that hold a part of its layers.

    Raises:
        SkippedError: it says too little, or sizes that do not fit.
    """
    if not row.get("n_experts"):
        return None
    if row.get("arch_verified") is False:
        raise SkippedError("experts of an architecture whose sizes are not verified")
    if not all(row.get(key) for key in ("top_k", "moe_ffn")):
        raise SkippedError("experts without a word on how many a token has, or on their width")
    if row.get("dense_layers") is None or (row["dense_layers"] and not row.get("ffn")):
        raise SkippedError("does not say which of its layers hold experts, or how wide the others are")
    if not row.get("ep") and row["n_gpus"] != 1:
        raise SkippedError("states no expert-parallel degree")
    if re.search("imbalance", str(row.get("notes") or "").lower()):
        raise SkippedError("loads of experts differ by an amount that it does not state")
    num, ep, ffn = int(row["n_experts"]), int(row.get("ep") or 1), int(row["moe_ffn"])
    etp = expert_tensor(row, tp)
    if num % ep or replicas % (ep * etp) or ffn % etp or int(row["top_k"]) > num:
        raise SkippedError("experts do not divide by their degrees")
    return Experts(
        num=num,
        top_k=int(row["top_k"]),
        ffn=ffn,
        shared=int(row.get("n_shared_experts") or 0) * ffn,
        dense_layers=int(row["dense_layers"]),
        dense_ffn=int(row.get("ffn") or 0),
        ep=ep,
        etp=etp,
        once=sends_once(row),
        overlaps=overlaps_exchange(row),
        fused=fused_experts(row),
        graphed=graphed(row),
    )


def expert_tensor(row: Row, tp: int) -> int:
    """Return how many ranks share an expert: as stated; one in Megatron-Bridge, ``tp`` in Megatron itself."""
    if row.get("etp"):
        return int(row["etp"])
    return 1 if "bridge" in framework_of(row) else tp


def sends_once(row: Row) -> bool:
    """Tell whether a token travels once to each rank: by its dispatcher, or Megatron-Bridge's where none is dropped."""
    stated = str(row.get("moe_dispatcher") or "").lower()
    if stated:
        return bool(ONCE_A_NODE.search(stated))
    notes = str(row.get("notes") or "").lower()
    if "dispatcher" in notes:
        return bool(ONCE_A_NODE.search(notes))
    return "bridge" in framework_of(row) and not _drops(row)


def overlaps_exchange(row: Row) -> bool:
    """Tell whether rows travel while another micro-batch computes: as stated, or where experts are fused."""
    stated = row.get("moe_overlap")
    if stated is not None:
        return bool(stated)
    return "1f1b overlap" in str(row.get("notes") or "").lower() or fused_experts(row)


def fused_experts(row: Row) -> bool:
    """Tell whether activations and casts are part of the products of all experts.

    As stated; Megatron-Bridge's recipes of 8 bits do so on Blackwell since June 2026, with a graph of the whole step.
    """
    stated = row.get("moe_fused")
    if stated is not None:
        return bool(stated)
    blocks = "mxfp8" in str(row.get("dtype") or "").lower()
    return blocks and "bridge" in framework_of(row) and date_of(row) >= "2026-06"


def graphed(row: Row) -> bool:
    """Tell whether the host launches graphs: as stated, where experts are fused or have capacities, or in racks.

    Megatron-Bridge's recipes capture attention and routing in racks, whose processors are slower, and whole steps
    where tokens are dropped: then shapes are known.
    """
    if row.get("moe_graphed") is not None:
        return bool(row["moe_graphed"])
    rack = str(row.get("gpu_device")) in ("GB200", "GB300")
    return fused_experts(row) or ("bridge" in framework_of(row) and (rack or _drops(row)))


def _drops(row: Row) -> bool:
    return "tokendrop" in str(row.get("notes") or "").lower()


def attention_weights(model: TransformerConfig) -> int:
    """Return the weights of a layer's attention.

    >>> model = TransformerConfig(2, 4096, 32, 8, 128, 14336, 32000, 8192, gated=True)
    >>> attention_weights(model) == 4096 * 128 * (2 * 32 + 2 * 8)
    True
    """
    latent = model.latent
    if latent is None:
        return model.hidden * model.channels * (2 * model.heads + 2 * model.kv_heads)
    heads = model.channels - latent.rotated + latent.value
    inside = latent.query * model.channels + latent.key_value * heads + latent.value * model.hidden
    return model.hidden * (latent.query + latent.key_value + latent.rotated) + model.heads * inside


def dense_weights(model: TransformerConfig) -> int:
    """Return the weights of a layer of ``model``: attention and its feed-forward part, routed experts left out."""
    return attention_weights(model) + (3 if model.gated else 2) * model.hidden * model.ffn


def expert_weights(model: TransformerConfig, experts: Experts) -> int:
    """Return the weights of one routed expert."""
    return (3 if model.gated else 2) * model.hidden * experts.ffn


def active_weights(model: TransformerConfig, experts: Experts | None, layers: int) -> float:
    """Return the weights that a token meets in ``layers`` layers, those of the head left out."""
    if experts is None:
        return float(layers * dense_weights(model))
    plain = dense_weights(model) + (3 if model.gated else 2) * model.hidden * (experts.dense_ffn - model.ffn)
    routed = dense_weights(model) + experts.top_k * expert_weights(model, experts) + model.hidden * experts.num
    return float(experts.dense_layers * plain + (layers - experts.dense_layers) * routed)


def layers_ahead(row: Row, model: TransformerConfig, experts: Experts) -> int:
    """Return the layers that predict tokens farther ahead, 0 or 1, by the flops that the row counts for a token.

    Megatron counts six for a weight, and twelve for a channel of a head and half the tokens of a causal sequence. Such
    a layer has the head of the model once more and joins two vectors of hidden size.
    """
    rate = row.get("tokens_per_s_per_gpu") or (row.get("tokens_per_s") or 0.0) / row["n_gpus"]
    if not row.get("tflops_per_gpu") or not rate:
        return 0
    counted = row["tflops_per_gpu"] * 1e12 / rate
    layers, head = int(row["layers"]), model.hidden * model.vocab
    width = model.channels + (model.latent.value if model.latent else model.channels)
    mixing = 3.0 * int(row["seq_len"]) * model.heads * width
    plain = 6.0 * (active_weights(model, experts, layers) + head) + layers * mixing
    one = active_weights(model, experts, layers + 1) - active_weights(model, experts, layers)
    more = 6.0 * (one + head + 2 * model.hidden**2) + mixing
    return 1 if abs(counted - plain - more) < min(0.5 * more, abs(counted - plain)) else 0
