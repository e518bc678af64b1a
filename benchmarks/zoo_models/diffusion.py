"""Denoisers and autoencoders of diffusers at small sizes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.zoo_models.case import Built, Case, enter, vision_package

KIND = "diffusion"


def _enter(
    name: str, model: str, inputs: Callable[[], dict[str, Any]], *, training: bool = True, **config: Any
) -> None:
    def build() -> Built:
        vision_package()
        diffusers = importlib.import_module("diffusers")
        return getattr(diffusers, model)(**config), (), {**inputs(), "return_dict": False}

    enter(Case(name, KIND, "diffusers", build, training))


def _noisy(channels: int, side: int, **more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"sample": torch.randn(2, channels, side, side), "timestep": torch.tensor([3, 7]), **more}


_enter(
    "unet2d", "UNet2DModel", _noisy(3, 16), sample_size=16, block_out_channels=(16, 32), layers_per_block=1,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    norm_num_groups=4, attention_head_dim=8,
)  # fmt: skip
UNET: dict[str, Any] = {
    "sample_size": 16, "block_out_channels": (16, 32), "layers_per_block": 1, "cross_attention_dim": 16,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "norm_num_groups": 4, "attention_head_dim": 8,
}  # fmt: skip


def _conditioned(**more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {**_noisy(4, 16)(), "encoder_hidden_states": torch.randn(2, 5, 16), **more}


_enter("unet2d-condition", "UNet2DConditionModel", _conditioned(), **UNET)
_enter("unet2d-condition-inference", "UNet2DConditionModel", _conditioned(), **UNET, training=False)
_enter(
    "controlnet", "ControlNetModel",
    lambda: {**_conditioned()(), "controlnet_cond": torch.randn(2, 3, 128, 128)},
    block_out_channels=(16, 32), layers_per_block=1, cross_attention_dim=16, norm_num_groups=4, attention_head_dim=8,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), conditioning_embedding_out_channels=(8, 8, 8, 8),
)  # fmt: skip
_enter(
    "unet3d", "UNet3DConditionModel",
    lambda: {"sample": torch.randn(1, 4, 2, 8, 8), "timestep": torch.tensor([3]),
             "encoder_hidden_states": torch.randn(1, 5, 16)},
    block_out_channels=(32, 32), layers_per_block=1, cross_attention_dim=16, norm_num_groups=4, attention_head_dim=8,
    down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
)  # fmt: skip
_enter(
    "unet1d", "UNet1DModel", lambda: {"sample": torch.randn(2, 4, 16), "timestep": torch.tensor([3, 7])},
    sample_size=16, in_channels=4, out_channels=4, block_out_channels=(32, 32, 64),
    down_block_types=("DownBlock1DNoSkip", "DownBlock1D", "AttnDownBlock1D"),
    up_block_types=("AttnUpBlock1D", "UpBlock1D", "UpBlock1DNoSkip"), extra_in_channels=64,
)  # fmt: skip
_enter(
    "dit", "DiTTransformer2DModel",
    lambda: {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 7]),
             "class_labels": torch.tensor([1, 4])},
    num_attention_heads=4, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, patch_size=2,
    num_embeds_ada_norm=10, norm_num_groups=4,
)  # fmt: skip
_enter(
    "pixart", "PixArtTransformer2DModel",
    lambda: {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 7]),
             "encoder_hidden_states": torch.randn(2, 5, 16),
             "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    num_attention_heads=4, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, patch_size=2,
    norm_num_groups=4, cross_attention_dim=32, caption_channels=16, use_additional_conditions=False,
)  # fmt: skip
_enter(
    "sd3", "SD3Transformer2DModel",
    lambda: {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3.0, 7.0]),
             "encoder_hidden_states": torch.randn(2, 5, 16), "pooled_projections": torch.randn(2, 12)},
    sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
    joint_attention_dim=16, caption_projection_dim=32, pooled_projection_dim=12, out_channels=4, pos_embed_max_size=8,
)  # fmt: skip
_enter(
    "flux", "FluxTransformer2DModel",
    lambda: {"hidden_states": torch.randn(2, 16, 4), "encoder_hidden_states": torch.randn(2, 5, 16),
             "pooled_projections": torch.randn(2, 12), "timestep": torch.tensor([0.3, 0.7]),
             "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(5, 3), "guidance": torch.tensor([1.0, 1.0])},
    in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=4,
    joint_attention_dim=16, pooled_projection_dim=12, guidance_embeds=True, axes_dims_rope=(2, 2, 4), patch_size=1,
)  # fmt: skip
_enter(
    "cogvideox", "CogVideoXTransformer3DModel",
    lambda: {"hidden_states": torch.randn(1, 2, 4, 8, 8), "encoder_hidden_states": torch.randn(1, 6, 16),
             "timestep": torch.tensor([3])},
    num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, time_embed_dim=8, text_embed_dim=16,
    num_layers=1, sample_width=8, sample_height=8, sample_frames=5, patch_size=2, temporal_compression_ratio=4,
    max_text_seq_length=6,
)  # fmt: skip
_enter(
    "sana", "SanaTransformer2DModel",
    lambda: {"hidden_states": torch.randn(2, 4, 8, 8), "encoder_hidden_states": torch.randn(2, 5, 16),
             "timestep": torch.tensor([3, 7])},
    in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=8, num_layers=1,
    num_cross_attention_heads=4, cross_attention_head_dim=8, cross_attention_dim=32, caption_channels=16, sample_size=8,
    patch_size=1,
)  # fmt: skip
_enter(
    "wan", "WanTransformer3DModel",
    lambda: {"hidden_states": torch.randn(1, 4, 2, 8, 8), "encoder_hidden_states": torch.randn(1, 5, 16),
             "timestep": torch.tensor([3])},
    patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
    freq_dim=16, ffn_dim=32, num_layers=1, rope_max_seq_len=32,
)  # fmt: skip
_enter(
    "autoencoder-kl", "AutoencoderKL", lambda: {"sample": torch.randn(2, 3, 16, 16)},
    block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    latent_channels=4, norm_num_groups=4, layers_per_block=1, sample_size=16,
)  # fmt: skip
_enter(
    "vq-model", "VQModel", lambda: {"sample": torch.randn(2, 3, 16, 16)},
    block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    latent_channels=4, norm_num_groups=4, num_vq_embeddings=16,
)  # fmt: skip
_enter(
    "autoencoder-tiny", "AutoencoderTiny", lambda: {"sample": torch.randn(2, 3, 32, 32)},
    encoder_block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
)  # fmt: skip
_enter(
    "prior", "PriorTransformer",
    lambda: {"hidden_states": torch.randn(2, 16), "timestep": torch.tensor([3, 7]),
    "proj_embedding": torch.randn(2, 16),
             "encoder_hidden_states": torch.randn(2, 5, 16)},
    num_attention_heads=4, attention_head_dim=8, num_layers=1, embedding_dim=16, num_embeddings=5,
    additional_embeddings=4,
)  # fmt: skip
