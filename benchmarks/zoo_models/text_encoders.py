"""Text encoders and encoder-decoders of transformers."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo_models.case import BATCH, LENGTH, VOCAB, Inputs, hugging_face, masked_text, text, words

ENCODER, BOTH = "text encoder", "encoder-decoder"

BERT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}


def _encoder(name: str, model: str, inputs: Inputs | None = None, **more: Any) -> None:
    hugging_face(name, ENCODER, model, {**BERT, **more}, inputs or masked_text())


def _classes(**more: Any) -> Inputs:
    def make() -> dict[str, Any]:
        return {"input_ids": words(), "labels": torch.randint(0, 2, (BATCH,)), **more}

    return make


def _answers() -> dict[str, Any]:
    return {
        "input_ids": words(),
        "start_positions": torch.randint(0, LENGTH, (BATCH,)),
        "end_positions": torch.randint(0, LENGTH, (BATCH,)),
    }


def _two(**more: Any) -> Inputs:
    """Return source tokens and target labels."""

    def make() -> dict[str, Any]:
        return {"input_ids": words(), "labels": words(length=6), "use_cache": False, **more}

    return make


_encoder("bert", "BertForMaskedLM")
_encoder("bert-classify", "BertForSequenceClassification", _classes())
_encoder("bert-answer", "BertForQuestionAnswering", _answers)
hugging_face("bert-inference", ENCODER, "BertModel", BERT, text(labels=False), training=False)
_encoder("roberta", "RobertaForMaskedLM")
_encoder(
    "xlm-roberta", "XLMRobertaForTokenClassification", _classes(labels=torch.ones(BATCH, LENGTH, dtype=torch.int64))
)
_encoder("camembert", "CamembertForMaskedLM")
_encoder("albert", "AlbertForMaskedLM", embedding_size=16)
_encoder("electra", "ElectraForMaskedLM", embedding_size=16)
_encoder(
    "electra-discriminator", "ElectraForPreTraining", _classes(labels=torch.ones(BATCH, LENGTH, dtype=torch.int64))
)
hugging_face(
    "distilbert",
    ENCODER,
    "DistilBertForMaskedLM",
    {"vocab_size": VOCAB, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 32},
    masked_text(),
)
_encoder(
    "deberta", "DebertaForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=16
)
_encoder(
    "deberta-v2",
    "DebertaV2ForMaskedLM",
    relative_attention=True,
    pos_att_type=["c2p", "p2c"],
    max_relative_positions=16,
    position_buckets=8,
)
_encoder("mpnet", "MPNetForMaskedLM")
_encoder("convbert", "ConvBertForMaskedLM", embedding_size=32, head_ratio=2, conv_kernel_size=3)
_encoder("squeezebert", "SqueezeBertForMaskedLM", embedding_size=32)
_encoder("mobilebert", "MobileBertForMaskedLM", embedding_size=32, intra_bottleneck_size=16, true_hidden_size=16)
_encoder("megatron-bert", "MegatronBertForMaskedLM")
_encoder("rembert", "RemBertForMaskedLM", input_embedding_size=16, output_embedding_size=24)
_encoder("roformer", "RoFormerForMaskedLM", embedding_size=32)
_encoder(
    "nystromformer",
    "NystromformerForMaskedLM",
    text(),
    num_landmarks=8,
    segment_means_seq_len=8,
    max_position_embeddings=16,
)
_encoder("yoso", "YosoForMaskedLM", use_expectation=True)
_encoder("fnet", "FNetForMaskedLM", text(), use_tpu_fourier_optimizations=False)
_encoder(
    "modernbert",
    "ModernBertForMaskedLM",
    global_attn_every_n_layers=2,
    local_attention=4,
    cls_token_id=1,
    sep_token_id=2,
)
_encoder("ernie", "ErnieForMaskedLM")
_encoder("esm", "EsmForMaskedLM", position_embedding_type="rotary", mask_token_id=3, token_dropout=True)
_encoder("ibert", "IBertForMaskedLM")
_encoder("splinter", "SplinterForQuestionAnswering", _answers)
_encoder("longformer", "LongformerForMaskedLM", text(), attention_window=4)
_encoder("big-bird", "BigBirdForMaskedLM", text(), attention_type="original_full")
_encoder("xlm", "XLMWithLMHeadModel", text(), emb_dim=32, n_layers=2, n_heads=4)
_encoder("flaubert", "FlaubertWithLMHeadModel", text(), emb_dim=32, n_layers=2, n_heads=4)
hugging_face(
    "funnel",
    ENCODER,
    "FunnelForMaskedLM",
    {"vocab_size": VOCAB, "block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64},
    text(),
)
_encoder(
    "canine",
    "CanineForSequenceClassification",
    _classes(),
    num_hash_buckets=64,
    downsampling_rate=2,
    local_transformer_stride=4,
)
_encoder("nomic-bert", "NomicBertForMaskedLM")
_encoder("dpr", "DPRReader", text(labels=False))
_encoder("luke", "LukeForSequenceClassification", _classes(), entity_vocab_size=16, entity_emb_size=16)
_encoder(
    "layoutlm",
    "LayoutLMForMaskedLM",
    text(bbox=torch.zeros(BATCH, LENGTH, 4, dtype=torch.int64)),
    max_2d_position_embeddings=64,
)
_encoder(
    "tapas",
    "TapasForMaskedLM",
    text(token_type_ids=torch.zeros(BATCH, LENGTH, 7, dtype=torch.int64)),
    type_vocab_sizes=[3, 8, 8, 2, 8, 8, 8],
)
hugging_face(
    "perceiver",
    ENCODER,
    "PerceiverForMaskedLM",
    {
        "vocab_size": VOCAB,
        "d_model": 32,
        "d_latents": 32,
        "num_latents": 8,
        "num_self_attends_per_block": 1,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
        "qk_channels": 32,
        "v_channels": 32,
        "max_position_embeddings": LENGTH,
    },
    lambda: {"inputs": words(), "labels": words()},
)

T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
BART: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}


def _t5(name: str, model: str, **more: Any) -> None:
    hugging_face(name, BOTH, model, {**T5, **more}, _two())


def _bart(name: str, model: str, **more: Any) -> None:
    hugging_face(name, BOTH, model, {**BART, **more}, _two())


_t5("t5", "T5ForConditionalGeneration")
_t5("t5-gated", "T5ForConditionalGeneration", feed_forward_proj="gated-gelu", tie_word_embeddings=False)
_t5("mt5", "MT5ForConditionalGeneration")
_t5("umt5", "UMT5ForConditionalGeneration")
_t5("longt5", "LongT5ForConditionalGeneration", local_radius=2, encoder_attention_type="local")
_t5("switch-transformers", "SwitchTransformersForConditionalGeneration", num_experts=4, expert_capacity=16)
_bart("bart", "BartForConditionalGeneration")
_bart("mbart", "MBartForConditionalGeneration")
_bart("pegasus", "PegasusForConditionalGeneration")
_bart("marian", "MarianMTModel")
_bart("blenderbot", "BlenderbotForConditionalGeneration")
_bart("blenderbot-small", "BlenderbotSmallForConditionalGeneration")
_bart("plbart", "PLBartForConditionalGeneration")
_bart("m2m-100", "M2M100ForConditionalGeneration")
_bart("bigbird-pegasus", "BigBirdPegasusForConditionalGeneration", attention_type="original_full")
_bart(
    "led",
    "LEDForConditionalGeneration",
    attention_window=4,
    max_encoder_position_embeddings=32,
    max_decoder_position_embeddings=32,
)
_bart("pegasus-x", "PegasusXForConditionalGeneration", num_global_tokens=4, block_size=4)
_bart("mvp", "MvpForConditionalGeneration")
hugging_face(
    "fsmt",
    BOTH,
    "FSMTForConditionalGeneration",
    {**BART, "langs": ["en", "de"], "src_vocab_size": VOCAB, "tgt_vocab_size": VOCAB},
    # Without masks of its own the decoder looks whether any token is padding.
    lambda: {
        **text(use_cache=False)(),
        "decoder_input_ids": words(),
        "decoder_attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.int64),
    },
)
hugging_face(
    "prophetnet",
    BOTH,
    "ProphetNetForConditionalGeneration",
    {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    _two(),
)
