"""The fidelity benchmark: predictions of forced configurations, its statistics, and its files."""

import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.passes.cost.devices import link
from benchmarks.fidelity import DATA, compare, most_spearman, ranks, read_rows, spearman
from benchmarks.predict_run import predict
from benchmarks.published_runs import read_run
from benchmarks.run_links import one_ring

from .test_published_runs import ROW

ROOT = Path(__file__).resolve().parents[2]
SMALL = {**ROW, "layers": 4, "hidden": 256, "heads": 4, "vocab": 1024, "seq_len": 128, "mbs": 2, "gbs": 32}


def test_statistics():
    """Ranks share ties, and a side without variation has no correlation."""
    assert ranks([2.0, 1.0, 2.0]) == [1.5, 0.0, 1.5]
    assert spearman([1.0, 2.0, 3.0], [1.0, 4.0, 9.0]) == 1.0
    assert spearman([1.0, 2.0], [2.0, 1.0]) == -1.0
    assert spearman([1.0, 1.0], [1.0, 2.0]) is None


@pytest.fixture(scope="module")
def run():
    """Return a small run on two tensor-parallel ranks."""
    return read_run(SMALL)


def test_what_a_prediction_is_made_of(run):
    """The parts are there, and add up to no more than the step."""
    found = predict(run)
    assert 0 < found["compute"] <= found["seconds"]
    assert found["compute"] + found["exposed"] + found["update"] <= found["seconds"] * (1 + 1e-9)


@pytest.mark.parametrize(
    "change",
    [{"recompute": "full"}, {"overlaps": False}, {"steps": 4}, {"reduced_bytes": 4.0}, {"attention": "unfused"}],
)
def test_what_must_cost_more(run, change):
    """Recomputing, waiting, more micro-batches and scores in memory cost more."""
    assert predict(replace(run, **change))["seconds"] >= predict(run)["seconds"]


def test_tensor_cores_wanted_multiples_of_eight(run):
    """Heads of 100 channels cost more before cuBLAS 11, heads of 64 do not."""
    for channels, costs_more in ((100, True), (64, False)):
        model = replace(run.model, channels=channels)
        old, new = (
            replace(run, model=model, device="v100-32gb", dtype="float16", attention="unfused", aligned_only=only)
            for only in (True, False)
        )
        assert (predict(old)["compute"] > predict(new)["compute"]) == costs_more


def test_zero_2_reduces_every_micro_batch(run):
    """Without stages it does; ZeRO-1 reduces once a step."""
    moves = {}
    for zero in (1, 2):
        found = predict(replace(run, zero=zero, steps=4))
        moves[zero] = found["hidden"] + found["exposed"]
    assert moves[2] > 2 * moves[1]


def test_kept_casts_of_weights(run):
    """Weights are cast once a step where a framework keeps their casts, and every micro-batch elsewhere."""
    wide = {
        **SMALL,
        "hidden": 2048,
        "heads": 16,
        "gpu_device": "H100-SXM-80GB",
        "tp": 1,
        "dtype": "fp8",
        "grad_accum": 8,
    }
    eight = read_run({**wide, "mbs": 1, "gbs": 128, "grad_accum": 8, "framework": "Megatron-LM", "tokens_per_s": 1e5})
    assert eight.keeps_casts
    assert predict(eight)["compute"] < predict(replace(eight, keeps_casts=False))["compute"]


def test_groups_that_split_parameters():
    """Groups of ranks gather among themselves, and reduce with each other what each of them holds."""
    many = {**SMALL, "tp": 1, "n_gpus": 64, "mbs": 2, "gbs": 128, "zero_stage": 3, "tokens_per_s": 1e6}
    whole, groups = (read_run({**many, "notes": notes}) for notes in (None, "JAX FSDP=16 within, DP outside"))
    assert (whole.shards, groups.shards, groups.copies) == (64, 16, 4)
    assert predict(groups)["hidden"] != predict(whole)["hidden"]
    assert read_run({**many, "notes": "FSDP=7 within"}).copies == 1


def test_the_most_that_repeats_allow():
    """Rows of equal facts are predicted alike, so that a perfect order of the others is the most."""
    assert most_spearman([2.0, 1.0, 3.0], [5.0, 4.0, 6.0]) == pytest.approx(1.0)
    assert most_spearman([1.0, 1.0, 1.0, 2.0], [1.0, 2.0, 3.0, 0.5]) < 1.0
    assert most_spearman([1.0, 1.0], [1.0, 2.0]) is None


def test_one_ring_over_nodes():
    """The slowest hop sets its pace; what lies inside one node is as it was."""
    over, inside = link("nvlink3*8+infiniband_100_shared"), link("nvlink3")
    ring = one_ring(over, 16)
    assert ring.bytes_per_s == link("infiniband_100_shared").bytes_per_s
    assert inside.latency_s < ring.latency_s < over.latency_s
    assert one_ring(inside, 8) is inside


def test_layers_count(run):
    """Twice the layers cost less than twice as much, by what is outside of them."""
    once, twice = (predict(replace(run, layers=n))["seconds"] for n in (8, 16))
    assert once < twice < 2 * once


def test_tables_by_source():
    """One row a source and one for all; rows left out are counted under their rule."""
    rows = [
        {**SMALL, "tp": 1},
        {**SMALL, "tp": 1, "tokens_per_s": 9e4},
        {**SMALL, "n_experts": 2, "source_id": "elsewhere"},
    ]
    rows.append({**SMALL, "gbs": "many", "source_id": "elsewhere"})
    table, detail = compare(rows)
    assert [row["source_id"] for row in table] == ["elsewhere", "somewhere", "all"]
    assert [row["rows_used"] for row in table] == [0, 2, 2]
    bare = "experts without a word on how many a token has, or on their width"
    assert table[-1]["skipped"] == {"a figure is no positive number": 1, bare: 1}
    assert table[0]["mape"] is None
    assert table[-1]["without_stages"]["rows_used"] == 2
    assert table[-1]["without_stages"]["mape"] == table[-1]["mape"]
    assert [table[-1][kind]["rows_used"] for kind in ("without_experts", "with_experts")] == [2, 0]
    assert len(detail) == 2


def test_the_script_writes_its_table(tmp_path):
    """A file of published rows in, a table out."""
    runs, out = tmp_path / "runs.json", tmp_path / "out.json"
    runs.write_text(json.dumps([{**SMALL, "n_experts": 2}]))
    command = [sys.executable, str(ROOT / "benchmarks" / "fidelity.py"), "--runs", str(runs), "--json", str(out)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    (_, whole) = json.loads(out.read_text())["rows"]
    assert whole["source_id"] == "all"
    assert set(whole) >= {"mape", "worst", "spearman", "rows_given", "rows_used", "skipped"}


def test_published_rows_are_there():
    """The copy of the published rows has all of them, each with its source."""
    rows = read_rows(DATA)
    assert len(rows) == 3195
    assert all(row["source_id"] and row["source_url"] for row in rows)
    assert gzip.decompress(DATA.read_bytes())


def test_norms_on_every_rank():
    """Without sequence parallelism every tensor-parallel rank computes all norms and residuals."""
    large = {**SMALL, "hidden": 2048, "heads": 16, "seq_len": 2048, "mbs": 8, "gbs": 64, "iter_s": 1.0}
    large = {**large, "tokens_per_s": None}
    whole, split = (predict(read_run({**large, "sequence_parallel": on})) for on in (False, True))
    assert split["compute"] < whole["compute"] < 2 * split["compute"]


def test_8_bits_are_faster_than_16():
    """Products of 8 bits take less, and their casts take some of it back."""
    large = {**SMALL, "hidden": 4096, "heads": 32, "seq_len": 2048, "gpu_device": "H100-SXM-80GB", "tp": 1}
    wide, narrow = (predict(read_run({**large, "dtype": dtype})) for dtype in ("bf16", "fp8"))
    assert 0.5 * wide["compute"] < narrow["compute"] < 0.95 * wide["compute"]


def test_stages_cost_a_bubble(run):
    """Stages with few micro-batches wait; chunks of a stage shorten that."""
    many = replace(run, layers=16, steps=4)
    one = predict(many)
    four = predict(replace(many, pp=4, num_devices=run.num_devices * 4))
    chunked = predict(replace(many, pp=4, num_devices=run.num_devices * 4, chunks=2))
    assert one["bubble"] == 0.0
    assert 0.4 < four["bubble"] / (four["compute"] - four["bubble"]) <= 3 / 4
    assert chunked["bubble"] == pytest.approx(four["bubble"] / 2)
    assert one["seconds"] / 4 < four["seconds"] < one["seconds"] * 1.1


def test_context_ranks_share_a_sequence(run):
    """Half the tokens of all keys: each of two context-parallel ranks takes more than half as long, less than whole."""
    half = replace(run.model, sequence=run.model.sequence // 2)
    split = predict(replace(run, model=half, cp=2, num_devices=run.num_devices * 2))
    assert predict(replace(run, model=half))["compute"] < split["compute"] < predict(run)["compute"] * 1.2


def test_a_file_of_anything(tmp_path):
    """Rows of odd types are counted under a rule and break nothing; a file without rows is refused in words."""
    path = tmp_path / "odd.json"
    path.write_text(json.dumps({"rows": [3, None, [], {"source_id": 7}, {**SMALL, "n_gpus": "8"}]}))
    table, detail = compare(read_rows(path))
    assert table[-1]["rows_given"] == 5
    assert sum(table[-1]["skipped"].values()) == 5
    assert detail == []
    path.write_text("{}")
    with pytest.raises(SystemExit, match="holds no list of rows"):
        read_rows(path)
