"""Audio models of transformers: speech recognition, self-supervised speech, spectrograms, codecs."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo_models.case import BATCH, Inputs, hugging_face, words

KIND = "audio"

SPEECH: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    "num_labels": 4,
    "classifier_proj_size": 16,
}
"""The words that the models since Wav2Vec2 share; masks and skipped layers are drawn by numpy, so they are off."""


def _wave() -> dict[str, Any]:
    return {"input_values": torch.randn(BATCH, 400)}


def _wave_class() -> dict[str, Any]:
    return {**_wave(), "labels": torch.randint(0, 4, (BATCH,))}


def _wave_text() -> dict[str, Any]:
    return {**_wave(), "labels": words(32, length=5)}


def _speech(name: str, model: str, inputs: Inputs = _wave_class, **more: Any) -> None:
    hugging_face(name, KIND, model, {**SPEECH, **more}, inputs)


hugging_face(
    "whisper",
    KIND,
    "WhisperForConditionalGeneration",
    {
        "vocab_size": 64,
        "num_mel_bins": 8,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_source_positions": 16,
        "max_target_positions": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "use_cache": False,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
    lambda: {"input_features": torch.randn(BATCH, 8, 32), "labels": words(length=6)},
)
_speech("wav2vec2", "Wav2Vec2ForSequenceClassification")
_speech("wav2vec2-ctc", "Wav2Vec2ForCTC", _wave_text)
hugging_face("wav2vec2-inference", KIND, "Wav2Vec2Model", SPEECH, _wave, training=False)
_speech("hubert", "HubertForSequenceClassification")
_speech("wavlm", "WavLMForSequenceClassification")
_speech("unispeech", "UniSpeechForSequenceClassification")
_speech("unispeech-sat", "UniSpeechSatForSequenceClassification")
_speech("data2vec-audio", "Data2VecAudioForSequenceClassification", conv_pos_kernel_size=3, num_conv_pos_embeddings=2)
_speech("sew", "SEWForSequenceClassification", squeeze_factor=2)
_speech("sew-d", "SEWDForSequenceClassification", squeeze_factor=2, max_position_embeddings=64, position_buckets=16)
_speech("wav2vec2-conformer", "Wav2Vec2ConformerForSequenceClassification", position_embeddings_type="rotary")
hugging_face(
    "wav2vec2-bert",
    KIND,
    "Wav2Vec2BertForSequenceClassification",
    {**SPEECH, "feature_projection_input_dim": 16, "conv_depthwise_kernel_size": 3, "apply_spec_augment": False},
    lambda: {"input_features": torch.randn(BATCH, 12, 16), "labels": torch.randint(0, 4, (BATCH,))},
)
hugging_face(
    "speech-to-text",
    KIND,
    "Speech2TextForConditionalGeneration",
    {
        "vocab_size": 64,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "input_feat_per_channel": 8,
        "conv_channels": 16,
        "max_source_positions": 32,
        "max_target_positions": 16,
        "use_cache": False,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
    },
    lambda: {"input_features": torch.randn(BATCH, 24, 8), "labels": words(length=6)},
)
hugging_face(
    "audio-spectrogram",
    KIND,
    "ASTForAudioClassification",
    {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "patch_size": 4,
        "num_mel_bins": 16,
        "max_length": 24,
        "frequency_stride": 4,
        "time_stride": 4,
        "num_labels": 4,
    },
    lambda: {"input_values": torch.randn(BATCH, 24, 16), "labels": torch.randint(0, 4, (BATCH,))},
)
hugging_face(
    "moonshine",
    KIND,
    "MoonshineForConditionalGeneration",
    {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "encoder_num_hidden_layers": 1,
        "decoder_num_hidden_layers": 1,
        "encoder_num_attention_heads": 4,
        "decoder_num_attention_heads": 4,
        "encoder_num_key_value_heads": 4,
        "decoder_num_key_value_heads": 4,
        "max_position_embeddings": 32,
        "use_cache": False,
        "decoder_start_token_id": 1,
        "pad_token_id": 0,
    },
    lambda: {"input_values": torch.randn(2, 1600), "labels": words(batch=2, length=6)},
)
hugging_face(
    "univnet",
    KIND,
    "UnivNetModel",
    {
        "model_in_channels": 8,
        "model_hidden_channels": 8,
        "num_mel_bins": 8,
        "resblock_kernel_sizes": [3],
        "resblock_stride_sizes": [4],
        "resblock_dilation_sizes": [[1, 3]],
        "kernel_predictor_hidden_channels": 8,
    },
    lambda: {"input_features": torch.randn(2, 6, 8), "noise_sequence": torch.randn(2, 6, 8)},
)
hugging_face(
    "dac",
    KIND,
    "DacModel",
    {"encoder_hidden_size": 8, "downsampling_ratios": [2, 2], "decoder_hidden_size": 16, "n_codebooks": 2,
     "codebook_size": 16, "codebook_dim": 4, "upsampling_ratios": [2, 2], "quantizer_dropout": 0.0},
    lambda: {"input_values": torch.randn(2, 1, 64)},
)  # fmt: skip
hugging_face(
    "encodec",
    KIND,
    "EncodecModel",
    {"num_filters": 4, "hidden_size": 16, "upsampling_ratios": [2, 2], "codebook_size": 16, "num_residual_layers": 1,
     "num_lstm_layers": 1, "target_bandwidths": [12.0], "sampling_rate": 64},
    lambda: {"input_values": torch.randn(2, 1, 64), "bandwidth": 12.0},
    training=False,
)  # fmt: skip
hugging_face(
    "vits",
    KIND,
    "VitsModel",
    {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16,
     "flow_size": 16, "spectrogram_bins": 9, "upsample_initial_channel": 16, "upsample_rates": [4, 4],
     "upsample_kernel_sizes": [8, 8], "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]],
     "prior_encoder_num_flows": 1, "posterior_encoder_num_wavenet_layers": 1, "duration_predictor_num_flows": 1},
    lambda: {"input_ids": words(32, batch=2)},
    training=False,
)  # fmt: skip
