"""Models of transformers that read pictures, sound and text together."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo_models.case import BATCH, LENGTH, VOCAB, Inputs, hugging_face, words
from benchmarks.zoo_models.text_decoders import LLAMA
from benchmarks.zoo_models.text_encoders import BART, BERT

KIND = "multimodal"

EYE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 16,
    "projection_dim": 16,
}
TEXT: dict[str, Any] = {
    **BERT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "projection_dim": 16,
}


def _pair(side: int = 32, **more: Any) -> Inputs:
    """Return as many pictures as texts, for a contrastive loss over the batch."""

    def make() -> dict[str, Any]:
        return {"input_ids": words(), "pixel_values": torch.randn(BATCH, 3, side, side), **more}

    return make


def _towers(name: str, model: str, inputs: Inputs | None = None, **more: Any) -> None:
    config = {"text_config": {**TEXT}, "vision_config": {**EYE}, "projection_dim": 16, **more}
    hugging_face(name, KIND, model, config, inputs or _pair(return_loss=True))


_towers("clip", "CLIPModel")
_towers("siglip", "SiglipModel")
_towers("chinese-clip", "ChineseCLIPModel")
_towers("altclip", "AltCLIPModel", text_config={**TEXT, "project_dim": 16})
_towers("blip", "BlipForConditionalGeneration", lambda: {
    "input_ids": words(), "pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": words()},
    text_config={**TEXT, "encoder_hidden_size": 32, "is_decoder": True, "label_smoothing": 0.0})  # fmt: skip
_towers("clipseg", "CLIPSegModel")
_towers("metaclip-2", "MetaClip2Model")
_towers("owlvit", "OwlViTModel")
_towers(
    "groupvit", "GroupViTModel",
    vision_config={**EYE, "depths": [1, 1, 1], "num_group_tokens": [4, 2, 0], "num_output_groups": [4, 2, 2],
                   "patch_size": 8},
    projection_intermediate_dim=16,
)  # fmt: skip
hugging_face(
    "clap", KIND, "ClapModel",
    {"text_config": {**TEXT, "max_position_embeddings": 40},
     "audio_config": {"patch_embeds_hidden_size": 16, "depths": [1, 1], "num_attention_heads": [2, 2], "spec_size": 32,
                      "num_mel_bins": 8, "patch_size": 2, "patch_stride": [2, 2], "window_size": 4, "hidden_size": 32,
                      "projection_dim": 16, "num_classes": 4},
     "projection_dim": 16},
    lambda: {"input_ids": words(), "input_features": torch.randn(BATCH, 1, 128, 8), "return_loss": True},
)  # fmt: skip
hugging_face(
    "align", KIND, "AlignModel",
    {"text_config": {**BERT, "hidden_size": 80}, "vision_config": {"width_coefficient": 0.25, "depth_coefficient": 0.25,
                                                "hidden_dim": 80, "image_size": 32},
     "projection_dim": 80},
    _pair(return_loss=True),
)  # fmt: skip
hugging_face(
    "vilt", KIND, "ViltForQuestionAnswering", {**BERT, "image_size": 32, "patch_size": 16, "num_labels": 5},
    lambda: {**_pair()(), "labels": torch.rand(BATCH, 5)},
)  # fmt: skip
hugging_face(
    "visual-bert", KIND, "VisualBertForPreTraining", {**BERT, "visual_embedding_dim": 12},
    lambda: {"input_ids": words(), "visual_embeds": torch.randn(BATCH, 3, 12),
             "visual_token_type_ids": torch.ones(BATCH, 3, dtype=torch.int64),
             "visual_attention_mask": torch.ones(BATCH, 3), "attention_mask": torch.ones(BATCH, LENGTH),
             "labels": words(length=LENGTH + 3)},
)  # fmt: skip
hugging_face(
    "lxmert", KIND, "LxmertForQuestionAnswering",
    {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "l_layers": 1,
     "x_layers": 1, "r_layers": 1, "visual_feat_dim": 12, "num_qa_labels": 5},
    lambda: {"input_ids": words(), "visual_feats": torch.randn(BATCH, 3, 12), "visual_pos": torch.rand(BATCH, 3, 4),
             "labels": torch.randint(0, 5, (BATCH,))},
)  # fmt: skip
hugging_face(
    "bridgetower", KIND, "BridgeTowerModel",
    {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1,
     "text_config": {**BERT, "hidden_size": 64, "max_position_embeddings": 40, "bos_token_id": 1, "eos_token_id": 2},
     "vision_config": {"hidden_size": 64, "num_hidden_layers": 2, "image_size": 32, "patch_size": 16}},
    _pair(),
)  # fmt: skip
hugging_face(
    "flava", KIND, "FlavaModel",
    {"text_config": {**BERT}, "image_config": {**EYE}, "multimodal_config": {**EYE}, "hidden_size": 32,
     "projection_dim": 16, "image_codebook_config": {"num_layers": 1}},
    _pair(),
)  # fmt: skip
hugging_face(
    "layoutlmv3", KIND, "LayoutLMv3ForSequenceClassification",
    {**BERT, "max_2d_position_embeddings": 64, "coordinate_size": 4, "shape_size": 8, "input_size": 32,
    "patch_size": 16,
     "num_labels": 3, "bos_token_id": 1, "eos_token_id": 2},
    lambda: {**_pair()(), "bbox": torch.zeros(BATCH, LENGTH, 4, dtype=torch.int64),
             "labels": torch.randint(0, 3, (BATCH,))},
)  # fmt: skip
hugging_face(
    "trocr", KIND, "TrOCRForCausalLM",
    {**BART, "decoder_layers": 2, "cross_attention_hidden_size": 16, "use_cache": False},
    lambda: {"input_ids": words(), "encoder_hidden_states": torch.randn(BATCH, 5, 16), "labels": words()},
)  # fmt: skip
hugging_face(
    "blip-2", KIND, "Blip2ForConditionalGeneration",
    {"vision_config": {**EYE},
     "qformer_config": {**BERT, "encoder_hidden_size": 32},
     "text_config": {"model_type": "opt", "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1,
                     "num_attention_heads": 4, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 32,
                     "pad_token_id": 0, "use_cache": False},
     "num_query_tokens": 2, "image_token_index": 3},
    lambda: _llava_inputs(2, 32, 3),
)  # fmt: skip


def _llava_inputs(places: int, side: int, mark: int) -> dict[str, Any]:
    """Return texts that hold ``places`` marks where the pieces of a picture belong."""
    tokens = words(length=LENGTH + places)
    tokens[:, 1 : 1 + places] = mark
    return {"input_ids": tokens, "pixel_values": torch.randn(BATCH, 3, side, side), "labels": tokens.clone()}


def _joined(name: str, model: str, places: int, *, language: dict[str, Any] | None = None,
            eye: dict[str, Any] | None = None, training: bool = True, **more: Any) -> None:  # fmt: skip
    """Enter a language model that reads a picture in place of marks in the text."""
    config = {
        "text_config": language or {**LLAMA, "model_type": "llama"},
        "vision_config": eye or {**EYE, "model_type": "clip_vision_model"},
        "image_token_id": 3,
        "image_token_index": 3,
        "use_cache": False,
        **more,
    }
    hugging_face(name, KIND, model, config, lambda: _llava_inputs(places, 32, 3), training=training)


_joined("llava", "LlavaForConditionalGeneration", 4, vision_feature_layer=-1)
_joined("vipllava", "VipLlavaForConditionalGeneration", 4, vision_feature_layers=[-1, -2])
_joined(
    "paligemma", "PaliGemmaForConditionalGeneration", 4,
    language={**LLAMA, "model_type": "gemma", "head_dim": 8},
    eye={**EYE, "model_type": "siglip_vision_model", "projection_dim": 32, "vision_use_head": False},
    projection_dim=32,
)  # fmt: skip
_joined(
    "aya-vision", "AyaVisionForConditionalGeneration", 1,
    language={**LLAMA, "model_type": "cohere2"},
    eye={**EYE, "model_type": "siglip_vision_model", "vision_use_head": False}, downsample_factor=2,
    vision_feature_layer=-1,
)  # fmt: skip
_joined(
    "got-ocr2", "GotOcr2ForConditionalGeneration", 1,
    language={**LLAMA, "model_type": "qwen2"},
    eye={"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
         "output_channels": 16, "mlp_dim": 64, "window_size": 2, "global_attn_indexes": [1]},
)  # fmt: skip


def _qwen2_vl() -> dict[str, Any]:
    tokens = words(batch=2, length=LENGTH + 4)
    tokens[:, 1] = 5
    tokens[:, 2:6] = 3
    return {
        "input_ids": tokens,
        "pixel_values": torch.randn(2 * 16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        "mm_token_type_ids": (tokens == 3).int(),
        "labels": tokens.clone(),
    }


def _qwen2_vl_config(library: Any) -> Any:
    return library.Qwen2VLConfig(
        text_config={**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1,
        1, 2]}},
        vision_config={"depth": 1, "embed_dim": 32, "num_heads": 4, "hidden_size": 32, "mlp_ratio": 2, "patch_size": 4,
                       "spatial_merge_size": 2, "temporal_patch_size": 2},
        image_token_id=3, vision_start_token_id=5, vision_end_token_id=6, video_token_id=7,
    )  # fmt: skip


hugging_face("qwen2-vl", KIND, "Qwen2VLForConditionalGeneration", _qwen2_vl_config, _qwen2_vl)
