"""Text decoders of transformers: next-token prediction, loss and all gradients, dropout as configured."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo_models.case import LENGTH, VOCAB, hugging_face, masked_text, text

KIND = "text decoder"

LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
"""The words that most decoders since Llama share."""

HEAD: dict[str, Any] = {**LLAMA, "head_dim": 8}


def _llama_like(name: str, model: str, **more: Any) -> None:
    hugging_face(name, KIND, model, {**LLAMA, **more}, text())


def _decoder(name: str, model: str, **config: Any) -> None:
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    hugging_face(name, KIND, model, {"vocab_size": VOCAB, **special, **config}, text())


_llama_like("llama", "LlamaForCausalLM")
hugging_face("llama-masked", KIND, "LlamaForCausalLM", LLAMA, masked_text())
hugging_face("llama-inference", KIND, "LlamaForCausalLM", LLAMA, text(labels=False), training=False)
hugging_face("llama-eager", KIND, "LlamaForCausalLM", {**LLAMA, "attn_implementation": "eager"}, text())
_llama_like("mistral", "MistralForCausalLM", sliding_window=4)
_llama_like("qwen2", "Qwen2ForCausalLM")
_llama_like("qwen3", "Qwen3ForCausalLM", head_dim=8)
_llama_like("gemma", "GemmaForCausalLM", head_dim=8)
_llama_like("gemma2", "Gemma2ForCausalLM", head_dim=8, query_pre_attn_scalar=8, sliding_window=4)
_llama_like("gemma3", "Gemma3ForCausalLM", head_dim=8, query_pre_attn_scalar=8, sliding_window=4)
_llama_like("phi", "PhiForCausalLM")
_llama_like("phi3", "Phi3ForCausalLM")
_llama_like("stablelm", "StableLmForCausalLM")
_llama_like("olmo", "OlmoForCausalLM")
_llama_like("olmo2", "Olmo2ForCausalLM")
_llama_like("olmo3", "Olmo3ForCausalLM", sliding_window=4)
_llama_like("starcoder2", "Starcoder2ForCausalLM")
_llama_like("cohere", "CohereForCausalLM")
_llama_like("cohere2", "Cohere2ForCausalLM", sliding_window=4)
_llama_like("granite", "GraniteForCausalLM")
_llama_like("glm", "GlmForCausalLM", head_dim=8)
_llama_like("glm4", "Glm4ForCausalLM", head_dim=8)
_llama_like("nemotron", "NemotronForCausalLM")
_llama_like("persimmon", "PersimmonForCausalLM")
_llama_like("helium", "HeliumForCausalLM", head_dim=8)
_llama_like("smollm3", "SmolLM3ForCausalLM")
_llama_like("ernie4-5", "Ernie4_5ForCausalLM")
_llama_like("exaone4", "Exaone4ForCausalLM", sliding_window=4)
_llama_like("arcee", "ArceeForCausalLM")
_llama_like("bitnet", "BitNetForCausalLM")
_llama_like("diffllama", "DiffLlamaForCausalLM")
_llama_like("seed-oss", "SeedOssForCausalLM", head_dim=8)
_decoder("gpt2", "GPT2LMHeadModel", n_positions=32, n_embd=32, n_layer=2, n_head=4)
hugging_face(
    "gpt2-inference",
    KIND,
    "GPT2LMHeadModel",
    {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False},
    text(labels=False),
    training=False,
)
_decoder("openai-gpt", "OpenAIGPTLMHeadModel", n_positions=32, n_embd=32, n_layer=2, n_head=4)
_decoder(
    "gpt-neo",
    "GPTNeoForCausalLM",
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    attention_types=[[["global", "local"], 1]],
    window_size=4,
    max_position_embeddings=32,
)
_decoder(
    "gpt-neox", "GPTNeoXForCausalLM", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
)
_decoder("gptj", "GPTJForCausalLM", n_embd=32, n_layer=2, n_head=4, n_positions=32, rotary_dim=4)
_decoder("codegen", "CodeGenForCausalLM", n_embd=32, n_layer=2, n_head=4, n_positions=32, n_ctx=32, rotary_dim=4)
_decoder("gpt-bigcode", "GPTBigCodeForCausalLM", n_embd=32, n_layer=2, n_head=4, n_positions=32)
_decoder(
    "opt",
    "OPTForCausalLM",
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    ffn_dim=64,
    word_embed_proj_dim=32,
    max_position_embeddings=32,
)
_decoder("bloom", "BloomForCausalLM", hidden_size=32, n_layer=2, n_head=4, hidden_dropout=0.1, attention_dropout=0.1)
_decoder("falcon", "FalconForCausalLM", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=False)
_decoder("falcon-alibi", "FalconForCausalLM", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True)
_decoder("mpt", "MptForCausalLM", d_model=32, n_layers=2, n_heads=4, max_seq_len=32)
_decoder("xglm", "XGLMForCausalLM", d_model=32, ffn_dim=64, num_layers=2, attention_heads=4)
_decoder(
    "biogpt", "BioGptForCausalLM", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
)
_decoder("ctrl", "CTRLLMHeadModel", n_positions=32, n_embd=32, dff=64, n_layer=2, n_head=4)
_decoder("xlnet", "XLNetLMHeadModel", d_model=32, n_layer=2, n_head=4, d_inner=64)
_decoder(
    "modernbert-decoder",
    "ModernBertDecoderForCausalLM",
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    local_attention=4,
    cls_token_id=1,
    sep_token_id=2,
)
hugging_face(
    "imagegpt",
    KIND,
    "ImageGPTForCausalImageModeling",
    {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False},
    text(),
)
hugging_face(
    "decision-transformer",
    KIND,
    "DecisionTransformerModel",
    {"state_dim": 5, "act_dim": 3, "hidden_size": 32, "n_layer": 2, "n_head": 4, "max_ep_len": 32, "use_cache": False},
    lambda: {
        "states": torch.randn(4, LENGTH, 5),
        "actions": torch.randn(4, LENGTH, 3),
        "rewards": torch.randn(4, LENGTH, 1),
        "returns_to_go": torch.randn(4, LENGTH, 1),
        "timesteps": torch.arange(LENGTH).repeat(4, 1),
        "attention_mask": torch.ones(4, LENGTH),
    },
)
