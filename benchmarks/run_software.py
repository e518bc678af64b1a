"""What a published row says of its software: kernels, precision, overlap. Facts and dates only, never a source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]

FLASH_SINCE = "2022-09"
"""Frameworks use fused attention from here on when a row does not say."""

SECOND_FLASH_SINCE = "2024-01"
"""Frameworks use FlashAttention-2 from here on: half a year after its release."""

LEAN_SINCE = "2023-03"
"""Since PyTorch 2.0, eager frameworks compute norms in 16 bits and the loss in one kernel."""

TUNED = re.compile("megatron|nemo|bridge|transformer.?engine|jax|maxtext|pax|xla|mlperf")
"""Frameworks that use cuDNN's attention on Hopper and later."""

FUSING = re.compile("megatron|nemo|bridge|transformer.?engine|deepspeed|apex|alpa|xla|jax|oneflow|compile|mlperf")
"""Frameworks with fused pointwise kernels, by hand or by a compiler; others run op by op unless a row says more."""

FUSED_SOFTMAX = re.compile("megatron|nemo|bridge|transformer.?engine|deepspeed|alpa|xla|jax|oneflow|compile|mlperf")
"""Those of them whose scale, mask and softmax of unfused attention are one kernel: Apex alone has none for models."""

COMPILED = re.compile("alpa|xla|jax|parax")
"""Frameworks on XLA, which overlaps transfers since its latency-hiding scheduler of 2023, and by default recomputes."""

STATIC = re.compile("alpa|xla|jax|parax|oneflow")
"""Frameworks that compile a static graph, whose kernels are fused across norms and residuals."""

RECOMPUTING = re.compile("maxtext|pax|deepspeed.*megatron|megatron.*deepspeed")
"""Frameworks that recompute all unless told: MaxText's and Praxis' default, and DeepSpeed's scripts for Megatron."""

TENSOR_OVERLAP = re.compile("nemo|bridge")
"""Frameworks that overlap tensor-parallel transfers with products, since Transformer Engine 0.10 of July 2023."""

NARROW = (("nvfp4|fp4", "float4_e2m1fn_x2"), ("fp8|float8|mxfp8", "float8_e4m3fn"))


def date_of(row: Row) -> str:
    """Return the date of a row as text that sorts; today where it says none."""
    return str(row.get("date") or "9")


def framework_of(row: Row) -> str:
    """Return the framework in small letters."""
    return str(row.get("framework") or "").lower()


def attention_kernel(row: Row, generation: str) -> str:
    """Return ``unfused``, or the generation of the fused kernel: ``first`` and ``second`` FlashAttention, ``tuned``."""
    stated, date = row.get("flash_attn"), date_of(row)
    fused = bool(stated) if stated is not None else date >= FLASH_SINCE and generation != "volta"
    if not fused or generation == "volta":
        return "unfused"
    if generation != "ampere" and date >= "2024" and TUNED.search(framework_of(row)):
        return "tuned"
    return "second" if date >= SECOND_FLASH_SINCE else "first"


def fused_kernels(row: Row) -> bool:
    """Tell whether chains of pointwise ops run as one kernel. Megatron's own are of mid-2020."""
    framework = framework_of(row)
    if re.search(r"\beager\b", str(row.get("notes") or "").lower()):
        return False
    stated = re.search(r"fused rms.?norm(\s*=\s*false)?", str(row.get("notes") or "").lower())
    if stated:
        return stated.group(1) is None
    if row.get("compile") is not None and "megatron" not in framework:
        return bool(row["compile"])
    if "megatron" in framework and date_of(row) < "2020-06":
        return False
    return bool(FUSING.search(framework))


def compiled(row: Row) -> bool:
    """Tell whether a compiler fused the kernels: whole chains, where kernels written by hand end at norms."""
    return bool(STATIC.search(framework_of(row))) or bool(row.get("compile"))


def fused_softmax(row: Row) -> bool:
    """Tell whether scale, mask and softmax of attention scores are one kernel where attention is not."""
    return fused_kernels(row) and bool(FUSED_SOFTMAX.search(framework_of(row)) or row.get("compile"))


def lean(row: Row) -> bool:
    """Tell whether norms are computed in 16 bits and the loss in one kernel."""
    return date_of(row) >= LEAN_SINCE


def dtype_of(row: Row) -> str:
    """Return the dtype of parameters and activations: 16 bits too where products are of 8 or 4."""
    text = str(row.get("dtype") or "bf16").lower()
    for word, dtype in (("bf16", "bfloat16"), ("fp16", "float16"), ("tf32", "tfloat32"), ("fp32", "float32")):
        if word in text:
            return dtype
    return "bfloat16"


def narrow_dtype(row: Row) -> str:
    """Return the dtype of 8 or 4 bits that products inside layers are computed in, else an empty text."""
    text = str(row.get("dtype") or "").lower()
    for pattern, dtype in NARROW:
        if re.search(pattern, text):
            return dtype
    return NARROW[1][1] if row.get("fp8") else ""


def zero_stage(row: Row) -> int:
    """Return 0 to 3."""
    stage = row.get("zero_stage")
    if stage is not None:
        return min(3, max(0, int(stage)))
    return 3 if row.get("fsdp") else 1 if row.get("distributed_optimizer") else 0


def copies(row: Row, ranks: int) -> int:
    """Return how many groups of the data-parallel ranks hold what ZeRO splits: 1 unless a note names their size."""
    stated = re.search(r"fsdp=(\d+) within", str(row.get("notes") or "").lower())
    size = int(stated.group(1)) if stated else ranks
    return ranks // size if size and ranks % size == 0 else 1


def recomputation(row: Row) -> str:
    """Return ``none``, ``attention``, ``streams`` (norms and activations), ``ops``, ``half`` or ``full``."""
    text = str(row.get("recompute") or "").lower()
    if not text:
        return "full" if RECOMPUTING.search(framework_of(row)) else "none"
    if text.startswith("none") or text == "false":
        return "none"
    if text.startswith("full") or "policy=full" in text or text == "true":
        return "full"
    if re.search(r"every (2nd|second|other)", text):
        return "half"
    if re.search(r"\bop\b|op-level|per-op|sac|budget", text):
        return "ops"
    return "streams" if re.search("norm|act|mlp", text.replace("activation", "")) else "attention"


def overlaps(row: Row) -> bool:
    """Tell whether gradients travel during the backward: all but Megatron and XLA before June 2023."""
    late = COMPILED.search(framework_of(row)) or ("megatron" in framework_of(row) and zero_stage(row) < 3)
    return not (late and date_of(row) < "2023-06")


def overlaps_tensors(row: Row) -> bool:
    """Tell whether tensor-parallel transfers travel during products."""
    stated = row.get("async_tp")
    if stated is not None:
        return bool(stated)
    return bool(TENSOR_OVERLAP.search(framework_of(row))) and date_of(row) >= "2023-07"


def unlimited_gathers(row: Row) -> bool:
    """Tell whether FSDP gathers as far ahead as the host is: before 2023, when its ``limit_all_gathers`` was new."""
    return bool(row.get("fsdp")) and date_of(row) < "2023"


def rowwise(row: Row) -> bool:
    """Tell whether products of 8 bits are scaled row by row, as a note says."""
    return "rowwise" in str(row.get("notes") or "").lower()


def block_scales(row: Row) -> bool:
    """Tell whether blocks of narrow operands have scales of their own: MXFP8 and NVFP4."""
    return bool(re.search("mx|nvfp4", str(row.get("dtype") or "").lower()))


def gathered_bytes(row: Row) -> float:
    """Return the bytes of an element of a parameter as it is gathered: one where a note says that 8 bits are."""
    return 1.0 if re.search(r"(fp8|float8) all-?gather", str(row.get("notes") or "").lower()) else 2.0


def keeps_casts(row: Row) -> bool:
    """Tell whether weights are cast to 8 bits once a step: Megatron tells Transformer Engine the first micro-batch."""
    return bool(re.search("megatron|nemo|bridge|transformer.?engine", framework_of(row)))


def aligned_only(row: Row) -> bool:
    """Tell whether tensor cores need dims that 8 divides: cuBLAS before 11, PyTorch before 1.7 of October 2020."""
    return date_of(row) < "2020-10"


def fused_accumulation(row: Row) -> bool:
    """Tell whether products add to the sum of gradients themselves, as Megatron's do since 2022."""
    return bool(re.search("megatron|nemo|bridge", framework_of(row))) and date_of(row) >= "2022"


def sequence_parallel(row: Row) -> bool:
    """Tell whether norms and residuals are split over tensor-parallel ranks; usual since Megatron's of June 2022."""
    stated = row.get("sequence_parallel")
    if stated is not None:
        return bool(stated)
    return date_of(row) >= "2022-06" and bool(re.search("megatron|nemo|bridge|torchtitan", framework_of(row)))


def early_gathers(row: Row) -> bool:
    """Tell whether ZeRO-3 gathers tensor after tensor: DeepSpeed before its prefetching of August 2021."""
    return "deepspeed" in framework_of(row) and date_of(row) < "2021-08"


def reduced_bytes(row: Row, dtype: str) -> float:
    """Return the bytes of an element of a gradient as it is reduced; Composer's default mode reduces in float32."""
    wide = re.search(r"mp mode (default|full)", str(row.get("notes") or "").lower())
    return 2.0 if dtype in ("float16", "bfloat16") and not wide else 4.0
