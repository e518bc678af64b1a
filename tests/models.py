"""Models that the tests share: small, ordinary, unmodified; each returns ``(model, args, kwargs)`` and yields its loss.

Every builder seeds torch itself, so that two calls give equal models and inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Mlp(nn.Module):
    """A multi-layer perceptron which returns its own loss."""

    def __init__(self, width: int, hidden: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(hidden, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.norm(x + self.down(self.drop(F.gelu(self.up(x)))))
        return F.cross_entropy(self.head(x), y)


class Block(nn.Module):
    """A residual block of two 3x3 convolutions with batch norm, in the way of torchvision."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample: nn.Module | None = None
        if stride != 1 or width_in != width:
            self.downsample = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        rest = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += rest
        result: Tensor = self.relu(out)
        return result


class ResNet(nn.Module):
    """A small residual network for images, with its loss inside."""

    def __init__(self, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = Block(width, width, 1)
        self.layer2 = Block(width, 2 * width, 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.drop = nn.Dropout(dropout)
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.avgpool(self.layer2(self.layer1(x)))
        logits = self.fc(self.drop(torch.flatten(x, 1)))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def mlp(dropout: float = 0.0, width: int = 16, hidden: int = 32, batch: int = 8) -> Built:
    """Return an MLP with a layer norm; inputs ``[batch, width]`` and class labels."""
    torch.manual_seed(0)
    model = Mlp(width, hidden, 10, dropout)
    return model, (torch.randn(batch, width), torch.randint(0, 10, (batch,))), {}


def resnet(dropout: float = 0.0, width: int = 8, batch: int = 4) -> Built:
    """Return a small residual network with batch norm; inputs ``[batch, 3, 16, 16]``; returns a dict with ``loss``."""
    torch.manual_seed(0)
    model = ResNet(width, 10, dropout)
    return model, (torch.randn(batch, 3, 16, 16), torch.randint(0, 10, (batch,))), {}


def _tokens(vocab: int, batch: int, length: int, masked: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(3, vocab, (batch, length))
    labels = ids.clone()
    labels[:, :masked] = -100
    return {"input_ids": ids, "labels": labels}


def gpt2(
    dropout: float = 0.0,
    layers: int = 2,
    vocab: int = 101,
    width: int = 32,
    heads: int = 4,
    batch: int = 4,
    length: int = 12,
) -> Built:
    """Return Hugging Face GPT-2 with a language modelling loss (tied embeddings)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocab, n_positions=2 * length, n_embd=width, n_layer=layers, n_head=heads,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train(), (), _tokens(vocab, batch, length)


def llama(
    dropout: float = 0.0, layers: int = 2, vocab: int = 96, width: int = 32, heads: int = 4, kv_heads: int = 2,
    batch: int = 4, length: int = 12,
) -> Built:  # fmt: skip
    """Return Hugging Face Llama with grouped heads; ``dropout`` acts on the attention weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=2 * length,
        attention_dropout=dropout, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train(), (), _tokens(vocab, batch, length)


def bert(
    dropout: float = 0.0, layers: int = 2, vocab: int = 97, width: int = 32, batch: int = 4, length: int = 12
) -> Built:
    """Return Hugging Face BERT with a masked language modelling loss, a padding mask and ignored labels."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=vocab, hidden_size=width, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=2 * width, max_position_embeddings=2 * length,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    kwargs = _tokens(vocab, batch, length, masked=length // 3)
    kwargs["attention_mask"] = torch.ones(batch, length, dtype=torch.int64)
    kwargs["attention_mask"][0, -3:] = 0
    return BertForMaskedLM(config).train(), (), kwargs


def vit(dropout: float = 0.0, layers: int = 2, width: int = 32, batch: int = 4) -> Built:
    """Return a Hugging Face vision transformer with a classification loss; images ``[batch, 3, 16, 16]``."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=2 * width, image_size=16,
        patch_size=4, num_labels=10, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    kwargs = {"pixel_values": torch.randn(batch, 3, 16, 16), "labels": torch.randint(0, 10, (batch,))}
    return ViTForImageClassification(config).train(), (), kwargs


def t5(
    dropout: float = 0.0, layers: int = 2, vocab: int = 96, width: int = 32, batch: int = 4, length: int = 12
) -> Built:
    """Return Hugging Face T5 (encoder and decoder, relative positions) with a language modelling loss."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=vocab, d_model=width, d_kv=width // 4, d_ff=2 * width, num_layers=layers, num_decoder_layers=layers,
        num_heads=4, dropout_rate=dropout, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    kwargs: dict[str, Any] = _tokens(vocab, batch, length)
    kwargs["labels"] = torch.randint(3, vocab, (batch, length - 2))
    kwargs["use_cache"] = False
    return T5ForConditionalGeneration(config).train(), (), kwargs


class Conditioned(nn.Module):
    """A residual block of a diffusion model: group norm, a convolution, a shift by the time, another convolution."""

    def __init__(self, width_in: int, width: int, time: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, width_in), nn.GroupNorm(4, width)
        self.conv1, self.conv2 = nn.Conv2d(width_in, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(time, width)
        self.drop = nn.Dropout(dropout)
        self.skip = nn.Conv2d(width_in, width, 1) if width_in != width else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        out = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        out = self.conv2(self.drop(F.silu(self.norm2(out))))
        result: Tensor = out + self.skip(x)
        return result


class UNet(nn.Module):
    """A U-Net as diffusion models have: every level's result skips over all levels below it; a time goes to each."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        widths = (width, 2 * width)
        self.down = nn.ModuleList(Conditioned(width, each, width, dropout) for each in widths)
        self.smaller = nn.ModuleList(nn.Conv2d(each, width, 3, 2, 1) for each in widths)
        self.middle = Conditioned(width, width, width, dropout)
        self.up = nn.ModuleList(Conditioned(width + each, width, width, dropout) for each in reversed(widths))
        self.leave = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor, noise: Tensor) -> Tensor:
        time = self.embed(time[:, None])
        x = self.enter(x)
        skips = []
        for block, smaller in zip(self.down, self.smaller, strict=True):
            skips.append(block(x, time))
            x = smaller(skips[-1])
        x = self.middle(x, time)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], 1), time)
        return F.mse_loss(self.leave(x), noise)


class TiedLanguageModel(nn.Module):
    """A causal transformer whose output projection is its embedding, one parameter under two names."""

    def __init__(self, layers: int, vocab: int, width: int, length: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.place = nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.embed(ids) + self.place.weight[:length]
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def unet(dropout: float = 0.0, width: int = 8, batch: int = 4) -> Built:
    """Return a U-Net with group norm, two long skips and a time; images ``[batch, 3, 8, 8]``."""
    torch.manual_seed(0)
    model = UNet(width, dropout)
    return model, (torch.randn(batch, 3, 8, 8), torch.rand(batch), torch.randn(batch, 3, 8, 8)), {}


def tied(
    dropout: float = 0.0, layers: int = 2, vocab: int = 96, width: int = 32, batch: int = 4, length: int = 12
) -> Built:
    """Return a language model of plain torch modules with tied embeddings; ids and labels ``[batch, length]``."""
    torch.manual_seed(0)
    model = TiedLanguageModel(layers, vocab, width, length, dropout)
    tokens = _tokens(vocab, batch, length)
    return model, (tokens["input_ids"], tokens["labels"]), {}


class Stack(nn.Module):
    """Equal layers one after the other, and a mean square loss."""

    def __init__(self, layers: int, width: int, hidden: int, norm: Callable[[int], nn.Module], dropout: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width), norm(width))
                for _ in range(layers)
            )
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.drop(self.layers(x)), y)


def stack(
    dropout: float = 0.0, layers: int = 8, width: int = 256, batch: int = 256,
    norm: Callable[[int], nn.Module] = nn.Identity,
) -> Built:  # fmt: skip
    """Return equal layers, large enough for stages to be worth while; inputs and targets ``[batch, width]``."""
    torch.manual_seed(0)
    model = Stack(layers, width, 4 * width, norm, dropout)
    return model, (torch.randn(batch, width), torch.randn(batch, width)), {}


MODELS: dict[str, Callable[..., Built]] = {
    "mlp": mlp,
    "resnet": resnet,
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "vit": vit,
    "t5": t5,
}
"""The builders that tests of every kind go through, by name; each takes ``dropout=``."""
