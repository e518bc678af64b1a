"""The models of the step benchmark: six families in two sizes, in plain PyTorch, each with its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models.families import ResNet, VisionTransformer
from benchmarks.models.transformer import Transformer, TransformerConfig


class Mlp(nn.Module):
    """Linear layers with ReLU between them, the mean square at the end."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        """Return a scalar."""
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        out: Tensor = self.layers[-1](x)
        return out.square().mean()


@dataclass(frozen=True)
class Case:
    """A model with inputs.

    Attributes:
        name: family and size: ``gpt-small``.
        build: makes the module; its values come from ``make_model``.
        batch: items of the global batch.
        shape: of one item of the first input.
        classes: of labels; 0 for a model without labels.
        tokens: the inputs are token numbers below ``classes`` and as many targets.
        blocks: the attribute that holds the repeated parts.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: int
    shape: tuple[int, ...]
    classes: int = 0
    tokens: bool = False
    blocks: str = "layers"

    def make_model(self) -> nn.Module:
        """Return the module with values that depend on nothing but the case."""
        torch.manual_seed(0)
        model = self.build()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 if self.tokens else 0.05)
        return model

    def make_inputs(self) -> tuple[Tensor, ...]:
        """Return the global batch."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.batch, *self.shape)
        if self.tokens:
            first, second = (torch.randint(0, self.classes, shape, generator=generator) for _ in range(2))
            return first, second
        values = torch.randn(shape, generator=generator)
        if not self.classes:
            return (values,)
        return values, torch.randint(0, self.classes, (self.batch,), generator=generator)


def _transformer(**sizes: Any) -> nn.Module:
    return Transformer(TransformerConfig(**sizes))


def _text(name: str, batch: int, **sizes: Any) -> Case:
    build = partial(_transformer, **sizes)
    return Case(name, build, batch, (sizes["sequence"],), sizes["vocab"], tokens=True)


def _sizes(layers: int, hidden: int, channels: int, ffn: int, vocab: int, sequence: int) -> dict[str, int]:
    heads = hidden // channels
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "channels": channels,
        "ffn": ffn,
        "vocab": vocab,
        "sequence": sequence,
    }


_LLAMA = {"gated": True, "rms_norm": True, "rotary": True, "tied": False}

CASES: tuple[Case, ...] = (
    _text("gpt-small", 8, **_sizes(4, 128, 32, 512, 1024, 64)),
    _text("gpt-large", 8, **_sizes(4, 384, 64, 1536, 4096, 128)),
    _text("llama-small", 8, **{**_sizes(4, 128, 16, 352, 1024, 64), "kv_heads": 4}, **_LLAMA),
    _text("llama-large", 8, **{**_sizes(4, 384, 48, 1024, 4096, 128), "kv_heads": 4}, **_LLAMA),
    _text("bert-small", 16, **_sizes(4, 128, 32, 512, 1024, 64), causal=False),
    _text("bert-large", 16, **_sizes(4, 256, 64, 1024, 4096, 128), causal=False),
    Case("vit-small", partial(VisionTransformer, 4, 128, 4, 512, 16, 64, 8), 16, (3, 64, 64), 16),
    Case("vit-large", partial(VisionTransformer, 6, 256, 4, 1024, 100, 96, 8), 16, (3, 96, 96), 100),
    Case("resnet-small", partial(ResNet, (1, 1), 32, 16), 16, (3, 64, 64), 16, blocks="blocks"),
    Case("resnet-large", partial(ResNet, (2, 2, 2), 32, 100), 16, (3, 96, 96), 100, blocks="blocks"),
    Case("mlp-small", partial(Mlp, 256, 1024, 1024, 256), 256, (256,)),
    Case("mlp-large", partial(Mlp, 1024, 2048, 2048, 2048, 1024), 512, (1024,)),
)
