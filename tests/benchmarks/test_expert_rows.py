"""Published rows with experts: what they say, sizes and bytes counted by hand, and what must cost more."""

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from autopar.passes.cost.devices import device
from benchmarks.expert_times import copies_seconds, exchanged_bytes, group_seconds, reached, routed_config
from benchmarks.models import routed, transformer
from benchmarks.predict_run import predict
from benchmarks.published_runs import expert_replicas, read_run, required_bytes
from benchmarks.run_constants import Constants
from benchmarks.run_experts import active_weights, attention_weights, dense_weights, expert_weights
from benchmarks.run_rules import SkippedError

FINE = {
    "id": "row-1",
    "source_id": "somewhere",
    "framework": "Megatron-Core",
    "layers": 48,
    "hidden": 2048,
    "heads": 32,
    "kv_heads": 4,
    "head_dim": 128,
    "ffn": 6144,
    "gated_mlp": True,
    "vocab": 151936,
    "n_experts": 128,
    "top_k": 8,
    "moe_ffn": 768,
    "n_shared_experts": 0,
    "dense_layers": 0,
    "ep": 8,
    "tp": 1,
    "seq_len": 4096,
    "gpu_device": "H100-SXM-80GB",
    "n_gpus": 16,
    "gpus_per_node": 8,
    "gbs": 256,
    "mbs": 1,
    "zero_stage": 1,
    "dtype": "bf16",
    "date": "2025-09",
    "iter_s": 20.0,
}
"""128 narrow experts of which a token has 8: 30.5 billion parameters, 3.3 of them active."""

LATENT = {
    **FINE,
    "layers": 61,
    "hidden": 7168,
    "heads": 128,
    "kv_heads": None,
    "head_dim": None,
    "ffn": 18432,
    "vocab": 129280,
    "n_experts": 256,
    "moe_ffn": 2048,
    "n_shared_experts": 1,
    "dense_layers": 3,
    "attention": "MLA(q_lora 1536, kv_lora 512, qk_nope 128, qk_rope 64, v 128)",
    "ep": 64,
    "pp": 8,
    "n_gpus": 512,
    "gbs": 2048,
}
"""Latent attention, a shared expert, three plain layers first: 671 billion parameters, 37 of them active."""

SMALL = {**FINE, "layers": 4, "hidden": 1024, "heads": 8, "kv_heads": 8, "moe_ffn": 512, "n_experts": 16, "top_k": 2}
SMALL = {**SMALL, "vocab": 1024, "mbs": 4, "iter_s": 1.0}


@pytest.mark.parametrize(("row", "total", "active"), [(FINE, 30.5e9, 3.3e9), (LATENT, 671e9, 37e9)])
def test_parameters_of_known_architectures(row, total, active):
    """Sizes of rows give the published counts: embedding, head, and a router in each layer with experts."""
    run = read_run(row)
    model, experts = run.model, run.experts
    around = 2 * model.vocab * model.hidden
    layers = run.layers - experts.dense_layers
    plain = attention_weights(model) + 3 * model.hidden * experts.dense_ffn
    routed_layer = dense_weights(model) + experts.num * (expert_weights(model, experts) + model.hidden)
    whole = around + experts.dense_layers * plain + layers * routed_layer
    assert whole == pytest.approx(total, rel=0.002)
    assert around + active_weights(model, experts, run.layers) == pytest.approx(active, rel=0.025)


def test_modules_have_the_weights_that_are_counted():
    """Latent attention and routed experts, module by module; norms and the router come on top."""
    run = read_run(LATENT)
    with torch.device("meta"):
        attention = transformer.LatentAttention(run.model, run.model.latent)
        experts = routed.RoutedExperts(routed_config(run))
    assert sum(p.numel() for p in attention.parameters()) == attention_weights(run.model) + 1536 + 512
    held = run.experts.local * expert_weights(run.model, run.experts) + 7168 * 256
    assert sum(p.numel() for p in experts.parameters()) == held


def test_rows_of_an_expert():
    """4,096 tokens of 8 experts, over 16 local experts: 2,048 rows for each; ranks that share one gather theirs."""
    config = routed_config(read_run(FINE))
    assert (config.tokens, config.local, config.rows // config.local, config.ffn) == (4096, 16, 2048, 768)
    shared = routed_config(read_run({**FINE, "tp": 4, "etp": 4, "ep": 4}))
    assert (shared.tokens, shared.local, shared.rows // shared.local, shared.ffn) == (1024, 32, 1024, 192)


def test_experts_compute_what_a_token_asks_for():
    """Rows that are sent, computed by groups and brought back give each token the sum over its own experts."""
    torch.manual_seed(0)
    config = routed.RoutedConfig(tokens=4, rows=8, hidden=8, ffn=6, experts=4, local=4, top_k=2)
    layer = routed.RoutedExperts(config).double()
    for parameter in (layer.gate, layer.up, layer.down):
        torch.nn.init.normal_(parameter)
    x = torch.randn(4, 8, dtype=torch.float64)
    chosen = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0]])
    order = chosen.flatten().argsort(stable=True)
    found = layer(x, order // 2, order.argsort())
    inside = layer.norm(x)
    weights = layer.router(inside).float().softmax(-1)[:, :2].double()
    for token, row in enumerate(chosen):
        out = x[token].clone()
        for place, expert in enumerate(row):
            gated = F.silu(inside[token] @ layer.gate[expert]) * (inside[token] @ layer.up[expert])
            out += weights[token, place] * (gated @ layer.down[expert])
        torch.testing.assert_close(found[token], out)


def test_bytes_of_an_exchange():
    """Every row travels alone: 7 of 8 inside a node; over two nodes half of them leave it."""
    rows = 4096 * 8 * 2048 * 2
    assert exchanged_bytes(read_run(FINE), 1) == (rows * 7 / 8, 0.0)
    assert exchanged_bytes(read_run({**FINE, "ep": 16}), 2) == (rows / 2 * 7 / 8, rows / 2)


def test_bytes_where_a_token_travels_once():
    """To each rank and each node once, however many of its experts are there."""
    run = read_run({**FINE, "ep": 16, "notes": "dispatcher DeepEP"})
    assert run.experts.once
    assert reached(2, 4, 2) == pytest.approx(2 * (1 - 1 / 6))
    within, across = exchanged_bytes(run, 2)
    token = 4096 * 2048 * 2
    # 8 of 128 experts miss a given half with a chance of 64 * .. * 57 / (128 * .. * 121)
    missed = 4426165368 / 1429702652400
    assert across == pytest.approx(token * 2 * (1 - missed) / 2)
    assert within == pytest.approx(token * reached(16, 128, 8) * 7 / 8)
    assert within < exchanged_bytes(replace(run, experts=replace(run.experts, once=False)), 1)[0]


def test_who_reduces_what():
    """Experts are held by as many ranks as their own degrees leave; the rest by all data-parallel ones."""
    run = read_run({**FINE, "tp": 2, "ep": 4, "etp": 1, "n_gpus": 32})
    assert (run.shards, expert_replicas(run)) == (16, 8)
    assert read_run({**FINE, "tp": 2, "ep": 4, "n_gpus": 32}).experts.etp == 2
    assert read_run({**FINE, "tp": 2, "ep": 4, "framework": "Megatron-Bridge"}).experts.etp == 1


def test_kernels_of_single_experts():
    """Six a layer for each of 16 experts, 10 with casts, 22 with scales of blocks; none where they are fused."""
    run = read_run(FINE)
    once = 16 * device("h100").launch_s
    assert group_seconds(run, False) + group_seconds(run, True) == pytest.approx(6 * once)
    narrow = replace(run, narrow="float8_e4m3fn")
    assert group_seconds(narrow, False) + group_seconds(narrow, True) == pytest.approx(10 * once)
    blocks = replace(narrow, block_scales=True)
    assert group_seconds(blocks, False) + group_seconds(blocks, True) == pytest.approx(22 * once)
    assert group_seconds(replace(blocks, experts=replace(run.experts, fused=True)), True) == 0.0


def test_copies_that_sort_rows():
    """Read and written once an exchange; a dispatcher that sends a token once, or one expert, needs none."""
    run = read_run(FINE)
    assert copies_seconds(run) == pytest.approx(4096 * 8 * 2048 * 4 / device("h100").stream_bytes_per_s)
    for change in ({"once": True}, {"num": 8}):
        assert copies_seconds(replace(run, experts=replace(run.experts, **change))) == 0.0


def test_layers_that_predict_ahead():
    """The flops that a row counts for a token tell whether there is one: 250 billion without, 260 with it."""
    rate = {**LATENT, "tokens_per_s_per_gpu": 1000.0, "iter_s": None}
    without, ahead = (read_run({**rate, "tflops_per_gpu": flops}) for flops in (249.8, 260.1))
    assert (without.experts.ahead, without.layers) == (0, 61)
    assert (ahead.experts.ahead, ahead.layers) == (1, 62)
    assert read_run(LATENT).experts.ahead == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_k": None}, "how many a token has"),
        ({"moe_ffn": None}, "on their width"),
        ({"dense_layers": None}, "which of its layers"),
        ({"dense_layers": 1, "ffn": None}, "how wide the others"),
        ({"ep": None}, "expert-parallel degree"),
        ({"notes": "real routing imbalance"}, "loads of experts differ"),
        ({"ep": 3}, "divide by their degrees"),
        ({"ep": 32}, "divide by their degrees"),
        ({"arch_verified": False}, "not verified"),
        ({"notes": "seq_len inferred from tokens/s"}, "length is a guess"),
        ({"attention": "MLA"}, "other attention"),
    ],
)
def test_rules_that_leave_experts_out(change, words):
    """Too few facts of experts, each with its rule."""
    with pytest.raises(SkippedError, match=words):
        read_run({**FINE, **change})


def test_broken_rows_end_in_a_rule():
    """Whatever stands in a row with experts, reading it gives a run, a rule, or an error that is counted."""
    draw = random.Random(0)
    odd = [None, "", "many", -1, 0, 1, 3, 7, 2.5, float("inf"), [], {}, True, False, 10**30, "MLA(q_lora 0, kv_lora 0"]
    keys = [
        "n_experts",
        "top_k",
        "moe_ffn",
        "n_shared_experts",
        "dense_layers",
        "ep",
        "etp",
        "attention",
        "tflops_per_gpu",
    ]
    skipped = 0
    for _ in range(1000):
        row = {**LATENT, **{draw.choice(keys): draw.choice(odd) for _ in range(draw.randint(1, 2))}}
        try:
            assert read_run(row).seconds > 0
        except (SkippedError, TypeError, ValueError, KeyError, ArithmeticError, AttributeError):
            skipped += 1
    assert 300 < skipped < 990


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16"])
def test_other_dtypes(dtype):
    """Experts are captured in the dtype of the row; TF32 computes on float32."""
    old = {**SMALL, "seq_len": 128, "gpu_device": "A100-SXM-80GB", "date": "2023-09", "dtype": dtype}
    assert 0 < predict(read_run(old))["seconds"] < 10


def test_software_by_date_and_notes():
    """What a row states counts first; else recipes by framework, date, device and whether tokens are dropped."""
    bridge = {**FINE, "framework": "Megatron-Bridge", "gpu_device": "GB200", "dtype": "MXFP8", "date": "2026-04"}
    bridge |= {"iter_s": 20.0}
    before, since = (read_run({**bridge, "date": date}).experts for date in ("2026-04", "2026-06"))
    assert (before.once, before.graphed, before.fused, before.overlaps) == (True, True, False, False)
    assert (since.once, since.graphed, since.fused, since.overlaps) == (True, True, True, True)
    stated = {"date": "2026-06", "moe_fused": False, "moe_overlap": False, "moe_dispatcher": "alltoall"}
    told = read_run({**bridge, **stated}).experts
    assert (told.once, told.fused, told.overlaps) == (False, False, False)
    dropped = read_run({**bridge, "gpu_device": "B200-SXM", "notes": "(tokendrop)"}).experts
    assert (dropped.once, dropped.graphed) == (False, True)
    assert read_run({**bridge, "gpu_device": "B200-SXM", "moe_graphed": True}).experts.graphed
    noted = read_run({**FINE, "notes": "dispatcher DeepEP; +1f1b overlap"}).experts
    assert (noted.once, noted.graphed, noted.overlaps) == (True, False, True)


@pytest.fixture(scope="module")
def run():
    """Return a small run whose host launches graphs."""
    found = read_run(SMALL)
    return replace(found, experts=replace(found.experts, graphed=True))


@pytest.mark.parametrize("change", [{"graphed": False}, {"dense_layers": 2}, {"ffn": 1024}, {"top_k": 4}])
def test_what_must_cost_more(run, change):
    """Launching kernel after kernel, wide plain layers first, wider experts, more of them a token."""
    experts = replace(run.experts, dense_ffn=8192)
    assert predict(replace(run, experts=replace(experts, **change)))["seconds"] > predict(run)["seconds"]


def test_graphs_hide_more(run):
    """Where the host launches kernel after kernel, less of an exchange hides than where it launches graphs."""
    saved = {}
    for graphed in (False, True):
        alone = replace(run, experts=replace(run.experts, graphed=graphed))
        over = replace(alone, experts=replace(alone.experts, overlaps=True))
        quick = Constants(expert_host_s=(0.0, 0.0))
        saved[graphed] = predict(alone, quick)["seconds"] - predict(over, quick)["seconds"]
    assert 0 < saved[False] < saved[True]


def test_a_layer_ahead_has_a_loss(run):
    """Of the same number of layers, one that predicts ahead computes the head and the loss once more."""
    ahead = predict(replace(run, experts=replace(run.experts, ahead=1)))["compute"]
    twice = predict(replace(run, experts=replace(run.experts, ahead=2)))["compute"]
    plain = predict(run)["compute"]
    assert ahead > plain
    assert twice - ahead == pytest.approx(ahead - plain)


def test_shared_experts_cost(run):
    """Every token passes through them too."""
    shared = replace(run, model=replace(run.model, ffn=1024), experts=replace(run.experts, shared=1024))
    assert predict(shared)["seconds"] > predict(run)["seconds"]


def test_what_must_cost_less(run):
    """An exchange that hides, and groups that are one kernel."""
    plain = predict(run)["seconds"]
    for change in ({"overlaps": True}, {"fused": True}):
        assert predict(replace(run, experts=replace(run.experts, **change)))["seconds"] < plain


def test_memory_of_experts():
    """Spreading experts over more ranks leaves fewer on each."""
    wide, narrow = (required_bytes(read_run({**FINE, "ep": ep})) for ep in (8, 16))
    held = 8 * 3 * 2048 * 768 * 48
    # two ranks that hold 16 experts share their Adam's state: 12 bytes; a rank that alone holds 8 has all of it: 18
    assert wide - narrow == pytest.approx(2 * held * 12 - held * 18)
