"""Models of timm at small sizes: logits and their gradients, no loss inside."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.zoo_models.case import Built, Case, enter, vision_package

KIND = "vision"


def _enter(name: str, model: str, side: int = 32, *, batch: int = 4, training: bool = True, **options: Any) -> None:
    def build() -> Built:
        vision_package()
        timm = importlib.import_module("timm")
        made = timm.create_model(model, pretrained=False, num_classes=10, **options)
        return made, (torch.randn(batch, 3, side, side),), {}

    enter(Case(name, KIND, "timm", build, training))


SMALL_VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}

_enter("timm-vit", "vit_tiny_patch16_224", **SMALL_VIT, drop_path_rate=0.2)
_enter("timm-vit-rel", "vit_relpos_small_patch16_224", **SMALL_VIT)
_enter("timm-deit3", "deit3_small_patch16_224", **SMALL_VIT)
_enter("timm-beit", "beitv2_base_patch16_224", **SMALL_VIT)
_enter("timm-eva02", "eva02_tiny_patch14_224", **SMALL_VIT)
_enter("timm-cait", "cait_xxs24_224", **SMALL_VIT)
_enter("timm-xcit", "xcit_nano_12_p16_224", img_size=32, embed_dim=32, depth=2, num_heads=4)
_enter("timm-convit", "convit_tiny", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, local_up_to_layer=1)
_enter(
    "timm-swin",
    "swin_tiny_patch4_window7_224",
    img_size=32,
    embed_dim=16,
    depths=(2, 1),
    num_heads=(2, 4),
    window_size=4,
)
_enter("timm-swin-v2", "swinv2_cr_tiny_224", img_size=32, window_size=2, embed_dim=16, depths=(2, 1), num_heads=(2, 4))
_enter("timm-convnext", "convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32))
_enter("timm-convnext-v2", "convnextv2_atto", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32))
_enter("timm-resnet", "resnet10t", channels=(16, 16, 32, 32))
_enter("timm-resnetv2", "resnetv2_50", layers=(1, 1, 1, 1), channels=(16, 16, 32, 32))
_enter("timm-resnest", "resnest14d", batch=2, training=False)
_enter("timm-ghostnet", "ghostnet_050", batch=2)
_enter("timm-efficientnet", "test_efficientnet", batch=2)
_enter("timm-mobilenetv3", "mobilenetv3_small_050", batch=2)
_enter("timm-regnet", "regnetx_002", batch=2, training=False)
_enter("timm-hrnet", "hrnet_w18_small", 64, batch=2, training=False)
_enter("timm-repvgg", "repvgg_a0", batch=2, training=False)
_enter("timm-edgenext", "edgenext_xx_small", 64, batch=2)
_enter("timm-efficientformer", "efficientformer_l1", 224, batch=1, training=False)
_enter("timm-maxvit", "maxvit_rmlp_pico_rw_256", 64, img_size=64, batch=2, training=False)
_enter("timm-coatnet", "coatnet_nano_rw_224", 64, img_size=64, batch=2, training=False)
_enter("timm-twins", "twins_svt_small", img_size=64, embed_dims=(8, 16, 16, 32), num_heads=(1, 2, 2, 4),
       depths=(1, 1, 1, 1), wss=(2, 2, 2, 2), side=64)  # fmt: skip
_enter(
    "timm-pit", "pit_ti_224", img_size=32, patch_size=4, stride=4, base_dims=(8, 8, 8), depth=(1, 1, 1), heads=(1, 2, 4)
)
_enter(
    "timm-visformer",
    "visformer_tiny",
    img_size=64,
    embed_dim=32,
    init_channels=8,
    depth=(1, 1, 1),
    num_heads=2,
    side=64,
)
_enter("timm-crossvit", "crossvit_tiny_240", img_size=48, side=48, img_scale=(1.0, 1.0), patch_size=(12, 16),
       embed_dim=(16, 32), depth=((1, 1, 0),), num_heads=(2, 2), mlp_ratio=(2, 2, 1))  # fmt: skip


def _enter_class(name: str, make: Callable[[Any], nn.Module], side: int = 32, *, batch: int = 4) -> None:
    """Enter a model whose registered makers fix its sizes: its class is called."""

    def build() -> Built:
        vision_package()
        return make(importlib.import_module("timm").models), (torch.randn(batch, 3, side, side),), {}

    enter(Case(name, KIND, "timm", build))


_enter_class("timm-convmixer", lambda m: m.ConvMixer(16, 2, kernel_size=5, patch_size=4, num_classes=10))
_enter_class(
    "timm-metaformer",
    lambda m: m.MetaFormer(
        depths=(1, 1, 1, 1), dims=(8, 16, 16, 32), num_classes=10, token_mixers=[m.metaformer.SepConv] * 4
    ),
)
_enter_class("timm-nest", lambda m: m.Nest(
    img_size=32, num_levels=2, embed_dims=(16, 32), num_heads=(2, 4), depths=(1, 1), num_classes=10))  # fmt: skip
_enter_class(
    "timm-gmlp",
    lambda m: m.MlpMixer(
        img_size=32, patch_size=8, embed_dim=32, num_blocks=2, mlp_ratio=4, num_classes=10,
        block_layer=m.mlp_mixer.SpatialGatingBlock, mlp_layer=m.mlp_mixer.GatedMlp,
    ),
)  # fmt: skip
_enter_class("timm-mixer", lambda m: m.MlpMixer(img_size=32, patch_size=8, embed_dim=32, num_blocks=2, num_classes=10))
