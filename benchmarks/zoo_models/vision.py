"""Vision models of transformers: convolutional, ViT-like, windowed, segmentation, detection; and time series."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.zoo_models.case import BATCH, Inputs, hugging_face, pictures

VISION, DETECTION, SERIES = "vision", "detection", "time series"
LABELS: dict[str, Any] = {"num_labels": 10}
VIT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
    **LABELS,
}


def _vit(name: str, model: str, inputs: Inputs | None = None, **more: Any) -> None:
    hugging_face(name, VISION, model, {**VIT, **more}, inputs or pictures())


def _vision(name: str, model: str, inputs: Inputs | None = None, **config: Any) -> None:
    hugging_face(name, VISION, model, {**LABELS, **config}, inputs or pictures())


def _maps(side: int = 32, classes: int = 10) -> Inputs:
    """Return pictures with a class for every pixel."""
    return lambda: {
        "pixel_values": torch.randn(BATCH, 3, side, side),
        "labels": torch.randint(0, classes, (BATCH, side, side)),
    }


_vit("vit", "ViTForImageClassification")
hugging_face("vit-inference", VISION, "ViTForImageClassification", VIT, pictures(classes=None), training=False)
_vit("deit", "DeiTForImageClassification")
_vit("beit", "BeitForImageClassification", use_relative_position_bias=True, drop_path_rate=0.1)
_vit("data2vec-vision", "Data2VecVisionForImageClassification", use_shared_relative_position_bias=True)
_vit("dinov2", "Dinov2ForImageClassification", mlp_ratio=2)
_vit("dinov2-registers", "Dinov2WithRegistersForImageClassification", mlp_ratio=2)
_vit("dinov3-vit", "DINOv3ViTModel", pictures(classes=None))
_vit("vit-msn", "ViTMSNForImageClassification")
_vit("ijepa", "IJepaForImageClassification")
_vit("vit-mae", "ViTMAEForPreTraining", pictures(classes=None), decoder_hidden_size=16, decoder_num_hidden_layers=1,
     decoder_num_attention_heads=2, decoder_intermediate_size=32)  # fmt: skip
_vit("vitdet", "VitDetModel", pictures(classes=None), num_channels=3, mlp_ratio=2, window_block_indices=[0],
     window_size=2, use_relative_position_embeddings=True)  # fmt: skip
_vision("swin", "SwinForImageClassification", image_size=32, patch_size=4, embed_dim=16, depths=[2, 1],
    num_heads=[2, 4],
        window_size=4)  # fmt: skip
_vision("swinv2", "Swinv2ForImageClassification", image_size=32, patch_size=4, embed_dim=16, depths=[2, 1],
        num_heads=[2, 4], window_size=4)  # fmt: skip
hugging_face(
    "swin-inference", VISION, "SwinForImageClassification",
    {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4,
     **LABELS},
    pictures(classes=None), training=False,
)  # fmt: skip
_vision("convnext", "ConvNextForImageClassification", hidden_sizes=[16, 32], depths=[1, 2], num_stages=2)
_vision("convnextv2", "ConvNextV2ForImageClassification", hidden_sizes=[16, 32], depths=[1, 2], num_stages=2)
_vision("resnet", "ResNetForImageClassification", embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1])
_vision("bit", "BitForImageClassification", embedding_size=8, hidden_sizes=[32, 64], depths=[1, 1], num_groups=4)
_vision(
    "regnet", "RegNetForImageClassification", embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], groups_width=8
)
_vision("mobilenet-v1", "MobileNetV1ForImageClassification", depth_multiplier=0.25, min_depth=4)
_vision("mobilenet-v2", "MobileNetV2ForImageClassification", depth_multiplier=0.25)
_vision("mobilevit", "MobileViTForImageClassification", pictures(64), image_size=64, hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32], num_attention_heads=4)  # fmt: skip
_vision("mobilevitv2", "MobileViTV2ForImageClassification", pictures(64), image_size=64, width_multiplier=0.25)
_vision("efficientnet", "EfficientNetForImageClassification", width_coefficient=0.25, depth_coefficient=0.25,
        hidden_dim=320, image_size=32)  # fmt: skip
_vision("poolformer", "PoolFormerForImageClassification", hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1])
_vision("pvt", "PvtForImageClassification", pictures(64), image_size=64, hidden_sizes=[8, 16, 32, 32],
        depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 4, 4])  # fmt: skip
_vision("pvt-v2", "PvtV2ForImageClassification", pictures(64), image_size=64, hidden_sizes=[8, 16, 32, 32],
        depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 4, 4])  # fmt: skip
_vision("cvt", "CvtForImageClassification", embed_dim=[8, 16, 32], num_heads=[1, 2, 4], depth=[1, 2, 3])
_vision("levit", "LevitForImageClassification", pictures(64), image_size=64, hidden_sizes=[16, 32, 32],
        num_attention_heads=[2, 4, 4], depths=[1, 1, 1], key_dim=[8, 8, 8])  # fmt: skip
_vision("focalnet", "FocalNetForImageClassification", image_size=32, embed_dim=16, depths=[1, 1], focal_levels=[1, 1],
        focal_windows=[3, 3], hidden_sizes=[16, 32])  # fmt: skip
_vision("swiftformer", "SwiftFormerForImageClassification", depths=[1, 1, 1, 1], embed_dims=[8, 16, 16, 32])
_vision("hiera", "HieraForImageClassification", image_size=[32, 32], patch_stride=[4, 4], patch_size=[7, 7],
        patch_padding=[3, 3], embed_dim=16, depths=[1, 1], num_heads=[1, 2], masked_unit_size=[4, 4],
        query_stride=[2, 2],
        num_query_pool=1)  # fmt: skip
_vision("segformer", "SegformerForSemanticSegmentation", _maps(), hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16)  # fmt: skip
_vision("hgnet-v2", "HGNetV2ForImageClassification", stem_channels=[3, 8, 16], stage_in_channels=[16, 32],
        stage_mid_channels=[8, 16], stage_out_channels=[32, 32], stage_num_blocks=[1, 1], stage_numb_of_layers=[2, 2],
        stage_downsample=[False, True], stage_light_block=[False, True], stage_kernel_size=[3, 3], depths=[1, 1],
        hidden_sizes=[32, 32], embedding_size=16)  # fmt: skip
_vit("dpt", "DPTForSemanticSegmentation", _maps(), num_hidden_layers=4, backbone_out_indices=[0, 1, 2, 3],
    neck_hidden_sizes=[8, 8, 16, 16],
     fusion_hidden_size=16, is_hybrid=False)  # fmt: skip
_vision("glpn", "GLPNForDepthEstimation", pictures(64, classes=None), hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16)  # fmt: skip
_vision("swin2sr", "Swin2SRForImageSuperResolution", pictures(16, classes=None), image_size=16, embed_dim=16,
    depths=[2],
        num_heads=[2], window_size=4, upscale=2, img_range=1.0)  # fmt: skip
hugging_face(
    "timesformer", VISION, "TimesformerForVideoClassification", {**VIT, "num_frames": 2},
    lambda: {"pixel_values": torch.randn(2, 2, 3, 32, 32), "labels": torch.randint(0, 10, (2,))},
)  # fmt: skip
hugging_face(
    "videomae", VISION, "VideoMAEForVideoClassification", {**VIT, "num_frames": 2, "tubelet_size": 2},
    lambda: {"pixel_values": torch.randn(2, 2, 3, 32, 32), "labels": torch.randint(0, 10, (2,))},
)  # fmt: skip
hugging_face(
    "vivit", VISION, "VivitForVideoClassification", {**VIT, "num_frames": 2, "tubelet_size": [2, 8, 8]},
    lambda: {"pixel_values": torch.randn(2, 2, 3, 32, 32), "labels": torch.randint(0, 10, (2,))},
)  # fmt: skip


def _boxes() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 64, 64)}


def _detr(backbone: Callable[[Any], Any] | None = None, **more: Any) -> Callable[[str], Callable[[Any], Any]]:
    """Return a maker of configs with a small ResNet as backbone."""

    def of(config_class: str) -> Callable[[Any], Any]:
        def make(library: Any) -> Any:
            small = library.ResNetConfig(
                embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1],
                out_features=["stage2", "stage3", "stage4"],
            )  # fmt: skip
            return getattr(library, config_class)(
                use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=small,
                d_model=32,
                encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
                encoder_ffn_dim=32, decoder_ffn_dim=32, num_queries=6, num_labels=5, **more,
            )  # fmt: skip

        return make

    return of


hugging_face("detr", DETECTION, "DetrForObjectDetection", _detr()("DetrConfig"), _boxes, training=False)
hugging_face(
    "table-transformer",
    DETECTION,
    "TableTransformerForObjectDetection",
    _detr()("TableTransformerConfig"),
    _boxes,
    training=False,
)
hugging_face(
    "conditional-detr",
    DETECTION,
    "ConditionalDetrForObjectDetection",
    _detr()("ConditionalDetrConfig"),
    _boxes,
    training=False,
)
hugging_face("dab-detr", DETECTION, "DabDetrForObjectDetection", lambda library: library.DabDetrConfig(
    use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, hidden_size=32, encoder_layers=1,
    decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32,
    num_queries=6, num_labels=5, backbone_config=library.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], out_features=["stage4"])),
        _boxes)  # fmt: skip
hugging_face(
    "yolos", DETECTION, "YolosForObjectDetection",
    {**VIT, "image_size": [64, 64], "num_detection_tokens": 6, "num_labels": 5}, _boxes,
)  # fmt: skip
hugging_face(
    "yolos-loss", DETECTION, "YolosForObjectDetection",
    {**VIT, "image_size": [64, 64], "num_detection_tokens": 6, "num_labels": 5},
    lambda: {**_boxes(), "labels": [
        {"class_labels": torch.tensor([1, 2]), "boxes": torch.rand(2, 4) * 0.4 + 0.3} for _ in range(2)]},
)  # fmt: skip

SERIES_MODEL: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "prediction_length": 4, "context_length": 8, "lags_sequence": [1,
    2], "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
    "num_time_features": 2,
}  # fmt: skip


def _series() -> dict[str, Any]:
    return {
        "past_values": torch.randn(BATCH, 10),
        "past_time_features": torch.randn(BATCH, 10, 2),
        "past_observed_mask": torch.ones(BATCH, 10),
        "future_values": torch.randn(BATCH, 4),
        "future_time_features": torch.randn(BATCH, 4, 2),
    }


def _patches(channels: int = 2) -> dict[str, Any]:
    return {"past_values": torch.randn(BATCH, 16, channels), "future_values": torch.randn(BATCH, 4, channels)}


hugging_face("time-series-transformer", SERIES, "TimeSeriesTransformerForPrediction", SERIES_MODEL, _series)
hugging_face("informer", SERIES, "InformerForPrediction", SERIES_MODEL, _series)
hugging_face("informer-full", SERIES, "InformerForPrediction", {**SERIES_MODEL, "attention_type": "full"}, _series)
hugging_face("autoformer", SERIES, "AutoformerForPrediction", {**SERIES_MODEL, "label_length": 4}, _series)
PATCHES: dict[str, Any] = {
    "num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "prediction_length": 4,
    "d_model": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 32,
}  # fmt: skip
hugging_face("patchtst", SERIES, "PatchTSTForPrediction", PATCHES, _patches)
hugging_face(
    "patchtsmixer", SERIES, "PatchTSMixerForPrediction",
    {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "prediction_length": 4,
     "d_model": 16, "num_layers": 2},
    _patches,
)  # fmt: skip
