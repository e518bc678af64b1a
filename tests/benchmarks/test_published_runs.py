"""Reading of published runs: what a row means, and the rules that leave one out."""

import random
from dataclasses import replace

import pytest

from benchmarks.published_runs import padded, read_run, required_bytes
from benchmarks.run_rules import SkippedError, micro_batches, step_seconds

ROW = {
    "id": "row-1",
    "source_id": "somewhere",
    "family": "gpt",
    "layers": 24,
    "hidden": 1024,
    "heads": 16,
    "seq_len": 1024,
    "gpu_device": "A100-SXM-80GB",
    "n_gpus": 16,
    "gpus_per_node": 8,
    "gbs": 128,
    "mbs": 8,
    "tp": 2,
    "zero_stage": 0,
    "dtype": "bf16",
    "date": "2023-09",
    "tokens_per_s": 131072.0,
}


def test_a_row_is_read():
    """Degrees, batches, dtype and time follow from the row."""
    run = read_run(ROW)
    assert (run.dp, run.tp, run.pp, run.cp, run.micro_batch, run.steps) == (8, 2, 1, 1, 8, 2)
    assert (run.device, run.dtype, run.zero, run.recompute) == ("a100", "bfloat16", 0, "none")
    assert run.seconds == pytest.approx(1.0)
    assert run.model.ffn == 4096
    assert run.attention == "first"
    assert not run.fused_kernels


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_experts": 8}, "experts without a word"),
        ({"fp8": True}, "no units"),
        ({"offload": "cpu"}, "offloads"),
        ({"oom": True}, "out of memory"),
        ({"gpu_device": "abacus"}, "device unknown"),
        ({"hidden": None}, "lacks"),
        ({"tokens_per_s": None}, "no time"),
        ({"iter_s": 3.0}, "contradict"),
        ({"dp": 4}, "degrees"),
        ({"mbs": 7, "gbs": 20}, "batch sizes"),
        ({"tp": None}, "no parallel degrees"),
        ({"tokens_per_s": 1e8}, "at their peak"),
        ({"family": "t5"}, "no plain"),
        ({"notes": "unpadded sequences"}, "shorter"),
        ({"source_kind": "CI golden values"}, "not tuned"),
        ({"family": "bert", "seq_len": 512}, "padding"),
        ({"verified": False}, "from memory"),
        ({"unverified_fields": ["gpu"]}, "a guess"),
        ({"pp": 2, "dp": None, "mbs": None}, "no micro-batch"),
        ({"pp": 8, "tp": 1, "dp": None, "mbs": 64}, "fewer micro-batches"),
        ({"pp": 3, "dp": None}, "degrees"),
        ({"heads": 15}, "divide"),
        ({"kv_heads": 5}, "divide"),
        ({"hidden": "wide"}, "positive number"),
        ({"hidden": True}, "positive number"),
        ({"gbs": float("nan")}, "positive number"),
        ({"layers": 2.5}, "whole number"),
        ({"attention": "MLA(q_lora 1536)"}, "other attention"),
    ],
)
def test_rules_that_leave_a_row_out(change, words):
    """Every rule speaks of facts, and says which."""
    with pytest.raises(SkippedError, match=words):
        read_run({**ROW, **change})


def test_broken_rows_end_in_a_rule():
    """Whatever stands in a row, reading it gives a run, a rule, or an error that is counted as a wrong type."""
    draw = random.Random(0)
    odd = [None, "", "many", -1, 0, 1, 7, 3.5, float("inf"), [], {}, ["gpu"], True, False, 10**30, "full", "BF16"]
    keys = [*ROW, "pp", "cp", "vpp", "recompute", "fp8", "offload", "notes", "unverified_fields", "head_dim", "vocab"]
    skipped = 0
    for _ in range(3000):
        row = {**ROW, **{draw.choice(keys): draw.choice(odd) for _ in range(draw.randint(1, 3))}}
        try:
            assert read_run(row).seconds > 0
        except (SkippedError, TypeError, ValueError, KeyError, ArithmeticError, AttributeError):
            skipped += 1
    assert 1000 < skipped < 2900


def test_stages_chunks_and_context():
    """Pipeline, context and interleaving degrees divide the devices and the sequence."""
    run = read_run({**ROW, "pp": 4, "vpp": 2, "cp": 2, "tp": 1, "gbs": 64})
    assert (run.dp, run.pp, run.cp, run.chunks, run.model.sequence) == (2, 4, 2, 2, 512)
    assert read_run({**ROW, "vpp": 2}).chunks == 1
    assert read_run({**ROW, "pp": 2, "fsdp": True, "zero_stage": None}).zero == 2


def test_narrow_numbers():
    """8 and 4 bits are read where the device has units for them; the other tensors stay in 16."""
    row = {**ROW, "gpu_device": "B200-SXM", "dtype": "NVFP4", "tokens_per_s": 1e6}
    assert read_run(row).narrow == "float4_e2m1fn_x2"
    run = read_run({**row, "dtype": "FP8-CS"})
    assert (run.narrow, run.dtype) == ("float8_e4m3fn", "bfloat16")
    with pytest.raises(SkippedError, match="no units"):
        read_run({**row, "gpu_device": "H100-SXM-80GB"})


def test_rounded_batches():
    """A global batch is taken as its micro-batches make it when it is printed rounded, never farther off."""
    assert micro_batches({"gbs": 1024, "mbs": 6, "grad_accum": 21}, 8) == (6, 21)
    assert micro_batches({"gbs": 128}, 8) == (16, 1)
    with pytest.raises(SkippedError, match="contradict"):
        micro_batches({"gbs": 1024, "mbs": 6, "grad_accum": 19}, 8)
    assert micro_batches({"gbs": 32, "mbs": 4, "grad_accum": 2, "pp": 4}, 4) == (4, 2)
    with pytest.raises(SkippedError, match="fewer micro-batches than stages"):
        micro_batches({"gbs": 32, "mbs": 4, "pp": 4}, 4)


def test_sequences_are_padded():
    """A length that its ranks nearly divide is padded by less than a hundredth."""
    assert padded(8190, 8) == 8192
    assert read_run({**ROW, "seq_len": 1023}).model.sequence == 1024
    with pytest.raises(SkippedError, match="divide"):
        read_run({**ROW, "seq_len": 33, "tp": 16, "dp": 1, "heads": 16})


def test_times_of_real_sequences():
    """A rate counts for the sequences that a step really has."""
    assert step_seconds({**ROW, "iter_s": None}, 64) == pytest.approx(0.5)


def test_older_frameworks():
    """Before fused attention and overlapped optimizers, rows that say nothing mean neither."""
    run = read_run({**ROW, "date": "2021-04", "framework": "Megatron-LM"})
    assert run.attention == "unfused"
    assert run.fused_kernels
    assert not run.overlaps
    assert not run.lean
    assert not read_run({**ROW, "date": "2020-02", "framework": "Megatron-LM"}).fused_kernels
    early = {**ROW, "date": "2021-04", "framework": "DeepSpeed ZeRO-3", "zero_stage": 3}
    assert read_run(early).early_gathers
    assert not read_run({**early, "date": "2022-04"}).early_gathers


def test_kernels_fused_by_hand_or_by_a_compiler():
    """A note may say that nothing is fused; only compilers fuse across norms; Apex has no softmax for scores."""
    by_hand = read_run({**ROW, "framework": "Megatron-LM"})
    assert (by_hand.fused_kernels, by_hand.compiled, by_hand.fused_softmax) == (True, False, True)
    traced = read_run({**ROW, "framework": "torchtitan", "compile": True})
    assert (traced.fused_kernels, traced.compiled, traced.fused_softmax) == (True, True, True)
    loose = read_run({**ROW, "framework": "PyTorch DDP + APEX"})
    assert (loose.fused_kernels, loose.compiled, loose.fused_softmax) == (True, False, False)
    noted = [read_run({**ROW, "notes": f"fused rms norm={value}"}).fused_kernels for value in (True, False)]
    assert noted == [True, False]


def test_gathers_ahead_need_memory():
    """FSDP before 2023 holds more gathered layers at once; ZeRO-2 none."""
    sharded = {**ROW, "tp": 1, "zero_stage": 3, "fsdp": True, "framework": "llm-foundry/Composer FSDP"}
    before, since = (read_run({**sharded, "date": date}) for date in ("2022-12", "2023-02"))
    assert (before.unlimited_gathers, since.unlimited_gathers) == (True, False)
    ahead = required_bytes(before) - required_bytes(replace(before, unlimited_gathers=False))
    assert ahead == 16.0 * 12 * 1024**2
    kept = replace(before, zero=2)
    assert required_bytes(kept) == required_bytes(replace(kept, unlimited_gathers=False))


def test_recipes_of_8_bits():
    """A note says what is gathered in 8 bits and which products are scaled row by row."""
    narrow = {**ROW, "gpu_device": "H100-SXM-80GB", "dtype": "fp8", "framework": "torchtitan"}
    plain, tensorwise, rows = (
        read_run({**narrow, "notes": notes}) for notes in (None, "float8 tensorwise + fp8 all-gather", "float8 rowwise")
    )
    assert [run.gathered_bytes for run in (plain, tensorwise, rows)] == [2.0, 1.0, 2.0]
    assert [run.rowwise for run in (plain, tensorwise, rows)] == [False, False, True]
    assert not plain.keeps_casts


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (None, "none"),
        ("none (said)", "none"),
        ("full:uniform1", "full"),
        ("selective (attention core)", "attention"),
        ("selective (per-op SAC)", "ops"),
        ("selective (every 2nd layer)", "half"),
        ("norm, act", "streams"),
    ],
)
def test_recomputation(text, kind):
    """What a row says of recomputation is one of six kinds."""
    assert read_run({**ROW, "recompute": text}).recompute == kind


def test_frameworks_that_recompute_unless_told():
    """MaxText and Pax recompute all where a row does not speak of it."""
    assert read_run({**ROW, "framework": "MaxText (JAX)"}).recompute == "full"


def test_recomputation_that_must_have_been():
    """A row that does not say, and whose activations surely can't fit, recomputed; one that says none did not."""
    large = {**ROW, "layers": 48, "hidden": 2048, "seq_len": 8192, "tp": 1, "zero_stage": 3, "tokens_per_s": 9000.0}
    assert read_run(large).recompute == "full"
    with pytest.raises(SkippedError, match="does not fit"):
        read_run({**large, "recompute": "none"})
    assert read_run(ROW).recompute == "none"


def test_memory_by_facts():
    """Recomputation, sharding, stages and 8 bits lower the estimate of memory."""
    most = required_bytes(read_run({**ROW, "tp": 1}))
    for change in ({"recompute": "full"}, {"zero_stage": 3}, {"tp": 2}):
        assert required_bytes(read_run({**ROW, "tp": 1, **change})) < most
