"""Reading of published runs: what a row means, and the rules that leave one out."""

import pytest

from benchmarks.published_runs import SkippedError, read_run

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
    assert (run.dp, run.tp, run.micro_batch, run.steps) == (8, 2, 8, 2)
    assert (run.device, run.dtype, run.zero, run.recompute) == ("a100", "bfloat16", 0, "none")
    assert run.seconds == pytest.approx(1.0)
    assert run.model.ffn == 4096
    assert run.attention == "second"
    assert not run.fused_kernels


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pp": 2}, "pipeline"),
        ({"n_experts": 8}, "experts"),
        ({"fp8": True}, "8 or 4 bits"),
        ({"cp": 2}, "context"),
        ({"offload": "cpu"}, "offloads"),
        ({"oom": True}, "out of memory"),
        ({"gpu_device": "abacus"}, "device unknown"),
        ({"hidden": None}, "lacks"),
        ({"tokens_per_s": None}, "no time"),
        ({"iter_s": 3.0}, "contradict"),
        ({"dp": 4}, "degrees"),
        ({"mbs": 7}, "batch sizes"),
        ({"tp": None}, "no parallel degrees"),
        ({"tokens_per_s": 1e8}, "at their peak"),
        ({"family": "t5"}, "no plain"),
        ({"notes": "unpadded sequences"}, "shorter"),
        ({"source_kind": "CI golden values"}, "not tuned"),
    ],
)
def test_rules_that_leave_a_row_out(change, words):
    """Every rule speaks of facts, and says which."""
    with pytest.raises(SkippedError, match=words):
        read_run({**ROW, **change})


def test_older_frameworks():
    """Before fused attention and overlapped optimizers, rows that say nothing mean neither."""
    run = read_run({**ROW, "date": "2021-04", "framework": "Megatron-LM"})
    assert run.attention == "unfused"
    assert run.fused_kernels
    assert not run.overlaps


def test_recomputation_that_must_have_been():
    """A row that does not say, and whose activations can't fit, recomputed; one that says none did not."""
    large = {**ROW, "layers": 48, "hidden": 2048, "seq_len": 4096, "tp": 1, "zero_stage": 3, "tokens_per_s": 9000.0}
    assert read_run(large).recompute == "full"
    with pytest.raises(SkippedError, match="does not fit"):
        read_run({**large, "recompute": "none"})
    assert read_run(ROW).recompute == "none"
