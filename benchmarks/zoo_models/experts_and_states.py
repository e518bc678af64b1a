"""Mixtures of experts and state-space or recurrent text models of transformers."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo_models.case import VOCAB, hugging_face, text
from benchmarks.zoo_models.text_decoders import LLAMA

EXPERTS, STATES = "mixture of experts", "state space"


def _experts(name: str, model: str, **more: Any) -> None:
    hugging_face(name, EXPERTS, model, {**LLAMA, **more}, text())


_experts("mixtral", "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
_experts(
    "mixtral-batched",
    "MixtralForCausalLM",
    num_local_experts=4,
    num_experts_per_tok=2,
    experts_implementation="batched_mm",
)
hugging_face(
    "mixtral-inference",
    EXPERTS,
    "MixtralForCausalLM",
    {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    text(labels=False),
    training=False,
)
_experts(
    "qwen2-moe",
    "Qwen2MoeForCausalLM",
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=32,
)
_experts("qwen3-moe", "Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8)
_experts("olmoe", "OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2)
_experts(
    "deepseek-v2",
    "DeepseekV2ForCausalLM",
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    moe_intermediate_size=16,
    first_k_dense_replace=1,
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_rope_head_dim=4,
    qk_nope_head_dim=8,
    v_head_dim=8,
    num_key_value_heads=4,
    n_group=1,
    topk_group=1,
)
_experts(
    "deepseek-v3",
    "DeepseekV3ForCausalLM",
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    moe_intermediate_size=16,
    first_k_dense_replace=1,
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_rope_head_dim=4,
    qk_nope_head_dim=8,
    v_head_dim=8,
    num_key_value_heads=4,
    n_group=2,
    topk_group=1,
)
_experts("granitemoe", "GraniteMoeForCausalLM", num_local_experts=4, num_experts_per_tok=2)
_experts("phimoe", "PhimoeForCausalLM", num_local_experts=4, num_experts_per_tok=2)
_experts("gpt-oss", "GptOssForCausalLM", num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=4)
_experts("jetmoe", "JetMoeForCausalLM", num_local_experts=4, num_experts_per_tok=2, kv_channels=8)
_experts("ernie4-5-moe", "Ernie4_5_MoeForCausalLM", moe_num_experts=4, moe_k=2, moe_intermediate_size=16)
_experts("minimax", "MiniMaxForCausalLM", num_local_experts=4, num_experts_per_tok=2, head_dim=8, block_size=4)
_experts(
    "dots1", "Dots1ForCausalLM", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8,
    n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1,
)  # fmt: skip
_experts(
    "glm4-moe", "Glm4MoeForCausalLM", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8,
    n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1,
)  # fmt: skip
_experts(
    "llama4", "Llama4ForCausalLM", num_local_experts=4, num_experts_per_tok=1, head_dim=8, intermediate_size_mlp=48,
    attention_chunk_size=4,
)  # fmt: skip

hugging_face(
    "nllb-moe",
    EXPERTS,
    "NllbMoeForConditionalGeneration",
    {
        "vocab_size": VOCAB,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "num_experts": 4,
        "expert_capacity": 32,
        "encoder_sparse_step": 2,
        "decoder_sparse_step": 2,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
        "use_cache": False,
    },
    text(),
)


def _states(name: str, model: str, **config: Any) -> None:
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    hugging_face(name, STATES, model, {"vocab_size": VOCAB, **special, **config}, text())


_states("mamba", "MambaForCausalLM", hidden_size=32, num_hidden_layers=2, state_size=4, time_step_rank=4)
_states(
    "mamba2", "Mamba2ForCausalLM", hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8,
    n_groups=2, chunk_size=4,
)  # fmt: skip
_states("falcon-mamba", "FalconMambaForCausalLM", hidden_size=32, num_hidden_layers=2, state_size=4, time_step_rank=4)
_states("rwkv", "RwkvForCausalLM", hidden_size=32, num_hidden_layers=2, attention_hidden_size=32, context_length=32)
_states(
    "recurrent-gemma", "RecurrentGemmaForCausalLM", hidden_size=32, num_hidden_layers=3, intermediate_size=48,
    num_attention_heads=4, num_key_value_heads=1, lru_width=32, attention_window_size=4,
    block_types=["recurrent", "recurrent", "attention"],
)  # fmt: skip
hugging_face(
    "jamba",
    STATES,
    "JambaForCausalLM",
    {
        **LLAMA,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    text(),
)
hugging_face(
    "bamba",
    STATES,
    "BambaForCausalLM",
    {
        **LLAMA,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 2,
        "mamba_chunk_size": 4,
        "attn_layer_indices": [1],
    },
    text(),
)
hugging_face(
    "zamba2",
    STATES,
    "Zamba2ForCausalLM",
    {
        **LLAMA,
        "num_key_value_heads": 4,
        "mamba_d_state": 8,
        "mamba_headdim": 8,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "chunk_size": 4,
        "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "hybrid"],
        "use_mem_rope": True,
        "adapter_rank": 8,
    },
    text(),
)
hugging_face("lfm2", STATES, "Lfm2ForCausalLM", {**LLAMA, "layer_types": ["conv", "full_attention"]}, text())
hugging_face(
    "qwen3-next",
    STATES,
    "Qwen3NextForCausalLM",
    {
        **LLAMA,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    text(),
)
_states("xlstm", "xLSTMForCausalLM", hidden_size=32, num_hidden_layers=2, num_heads=4, chunk_size=4, qk_dim_factor=0.5)
