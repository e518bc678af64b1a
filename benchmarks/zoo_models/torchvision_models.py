"""Models of torchvision, small where their constructors allow it; logits and their gradients, no loss inside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.zoo_models.case import Built, Case, enter, vision_package

KIND = "vision"


def _enter(
    name: str, make: Callable[[Any], nn.Module], side: int = 32, *, batch: int = 4, training: bool = True,
    shape: tuple[int, ...] | None = None,
) -> None:  # fmt: skip
    def build() -> Built:
        models = vision_package().models
        return make(models), (torch.randn(shape or (batch, 3, side, side)),), {}

    enter(Case(name, KIND, "torchvision", build, training))


_enter("tv-resnet18", lambda m: m.ResNet(m.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10))
_enter("tv-resnet50", lambda m: m.ResNet(m.resnet.Bottleneck, [1, 1, 1, 1], num_classes=10, width_per_group=16))
_enter(
    "tv-resnext",
    lambda m: m.ResNet(m.resnet.Bottleneck, [1, 1, 1, 1], num_classes=10, groups=8, width_per_group=4),
)  # fmt: skip
_enter("tv-resnet-inference", lambda m: m.ResNet(m.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10), training=False)
_enter("tv-densenet", lambda m: m.DenseNet(8, (2, 2), 16, bn_size=2, num_classes=10))
_enter("tv-mobilenet-v2", lambda m: m.MobileNetV2(10, width_mult=0.25), batch=2)
_enter("tv-mobilenet-v3", lambda m: m.mobilenet_v3_small(num_classes=10), batch=2)
_enter("tv-squeezenet", lambda m: m.squeezenet1_1(num_classes=10), 64, batch=2)
_enter("tv-shufflenet", lambda m: m.ShuffleNetV2([1, 1, 1], [8, 16, 32, 64, 64], num_classes=10), batch=2)
_enter("tv-mnasnet", lambda m: m.MNASNet(0.1, num_classes=10), batch=2)
_enter("tv-vgg", lambda m: m.VGG(m.vgg.make_layers([8, "M", 512, "M"], batch_norm=True), 10), batch=2, training=False)
_enter("tv-alexnet", lambda m: m.alexnet(num_classes=10), 64, batch=2, training=False)
_enter("tv-convnext", lambda m: m.ConvNeXt(
    [m.convnext.CNBlockConfig(16, 32, 1), m.convnext.CNBlockConfig(32, None, 1)], 0.1, num_classes=10))  # fmt: skip
_enter(
    "tv-swin",
    lambda m: m.SwinTransformer([4, 4], 16, [2, 1], [2, 4], [4, 4], stochastic_depth_prob=0.2, num_classes=10),
)
_enter("tv-swin-v2", lambda m: m.SwinTransformer(
    [4, 4], 16, [2, 1], [2, 4], [4, 4], num_classes=10, block=m.swin_transformer.SwinTransformerBlockV2,
    downsample_layer=m.swin_transformer.PatchMergingV2))  # fmt: skip
_enter("tv-vit", lambda m: m.VisionTransformer(32, 8, 2, 4, 32, 64, dropout=0.1, num_classes=10))
_enter(
    "tv-regnet",
    lambda m: m.RegNet(m.regnet.BlockParams([1, 1], [16, 32], [8, 8], [1.0, 1.0], [2, 2], se_ratio=0.25), 10),
)
_enter("tv-efficientnet", lambda m: m.EfficientNet(
    [m.efficientnet.MBConvConfig(1, 3, 1, 16, 8, 1), m.efficientnet.MBConvConfig(4, 3, 2, 8, 16, 2),
     m.efficientnet.FusedMBConvConfig(4, 3, 2, 16, 24, 1)], 0.1, num_classes=10, last_channel=64))  # fmt: skip
_enter("tv-maxvit", lambda m: m.MaxVit((32, 32), 8, 4, [16, 16], [1, 1], 8, 0.1, num_classes=10))
_enter("tv-googlenet", lambda m: m.GoogLeNet(10, aux_logits=False, init_weights=False), 64, batch=2, training=False)
_enter("tv-inception", lambda m: m.Inception3(10, aux_logits=False, init_weights=False), 80, batch=2, training=False)
_enter("tv-r3d", lambda m: m.video.VideoResNet(
    m.video.resnet.BasicBlock, [m.video.resnet.Conv3DSimple] * 4, [1, 1, 1, 1], m.video.resnet.BasicStem, 10),
    shape=(2, 3, 4, 16, 16), training=False)  # fmt: skip
_enter("tv-fcn", lambda m: m.segmentation.FCN(
    m.segmentation.fcn.IntermediateLayerGetter(
        m.ResNet(m.resnet.BasicBlock, [1, 1, 1, 1]), {"layer4": "out"}), m.segmentation.fcn.FCNHead(512,
        5)))  # fmt: skip
_enter("tv-deeplab", lambda m: m.segmentation.DeepLabV3(
    m.segmentation.fcn.IntermediateLayerGetter(m.ResNet(m.resnet.BasicBlock, [1, 1, 1, 1]), {"layer3": "out"}),
    m.segmentation.deeplabv3.DeepLabHead(256, 5, (2, 4))))  # fmt: skip
_enter("tv-lraspp", lambda m: m.segmentation.LRASPP(
    m.segmentation.fcn.IntermediateLayerGetter(
        m.ResNet(m.resnet.BasicBlock, [1, 1, 1, 1]), {"layer2": "low", "layer4": "high"}), 128, 512, 5))  # fmt: skip


def _raft() -> Built:
    raft = vision_package().models.optical_flow.raft
    encoder = partial(raft.FeatureEncoder, block=raft.ResidualBlock, layers=(8, 8, 8, 16, 16))
    model = raft.RAFT(
        feature_encoder=encoder(norm_layer=nn.InstanceNorm2d),
        context_encoder=raft.FeatureEncoder(
            block=raft.ResidualBlock, layers=(8, 8, 8, 16, 24), norm_layer=nn.BatchNorm2d
        ),
        corr_block=raft.CorrBlock(num_levels=2, radius=1),
        update_block=raft.UpdateBlock(
            motion_encoder=raft.MotionEncoder(
                in_channels_corr=2 * 9, corr_layers=(8, 8), flow_layers=(8, 8), out_channels=16
            ),
            recurrent_block=raft.RecurrentBlock(
                input_size=16 + 8, hidden_size=16, kernel_size=((1, 3), (3, 1)), padding=((0, 1), (1, 0))
            ),
            flow_head=raft.FlowHead(in_channels=16, hidden_size=8),
        ),
    )
    pair = torch.randn(1, 3, 128, 128), torch.randn(1, 3, 128, 128)
    return model, pair, {"num_flow_updates": 2}


enter(Case("tv-raft", KIND, "torchvision", _raft))
