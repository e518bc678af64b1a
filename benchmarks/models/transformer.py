"""A transformer of plain PyTorch modules: GPT, BERT, Llama, latent attention, by sizes and switches, with its loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Latent:
    """Widths of latent attention: queries, and keys with values, pass through narrow vectors.

    Attributes:
        query, key_value: widths of the vectors; heads are made from them.
        rotated: channels of a head that carry positions, the same ones of keys for all heads.
        value: channels of a head's values.
    """

    query: int
    key_value: int
    rotated: int
    value: int


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and switches.

    Attributes:
        channels: of a head's queries and keys.
        ffn: width of the feed-forward part; 0 leaves it out with its norm.
        gated: three matrices in the feed-forward part (SwiGLU) instead of two with GELU.
        causal: a decoder; else an encoder that predicts 5 of 32 tokens, which were masked.
        rms_norm: RMSNorm without biases anywhere; else LayerNorm with biases.
        rotary: rotary positions; else learned ones.
        tied: the head is the embedding.
        dropout: on the embedding and behind each part of a layer.
        latent: the widths of latent attention, where it is of that kind.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    channels: int
    ffn: int
    vocab: int
    sequence: int
    gated: bool = False
    causal: bool = True
    rms_norm: bool = False
    rotary: bool = False
    tied: bool = True
    dropout: float = 0.0
    latent: Latent | None = None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn every pair of channels of ``x`` ``[batch, heads, sequence, channels]`` by its position's angle."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class RMSNorm(nn.Module):
    """Divide by the root of the mean square of the last dim, in float32, and scale."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` normalised, of its own shape and dtype."""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class Attention(nn.Module):
    """Attention of grouped heads."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        bias = not config.rms_norm
        kv_width = config.kv_heads * config.channels
        self.q_proj = nn.Linear(config.hidden, config.heads * config.channels, bias=bias)
        self.k_proj = nn.Linear(config.hidden, kv_width, bias=bias)
        self.v_proj = nn.Linear(config.hidden, kv_width, bias=bias)
        self.o_proj = nn.Linear(config.heads * config.channels, config.hidden, bias=bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the mixed values ``[batch, sequence, hidden]``."""
        config = self.config
        q, k, v = (
            proj(x).view(*x.shape[:2], -1, config.channels).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if config.rotary:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        grouped = config.kv_heads != config.heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=config.causal, enable_gqa=grouped)
        return self.o_proj(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))  # type: ignore[no-any-return]


class LatentAttention(nn.Module):
    """Attention whose queries, keys and values are made from narrow vectors (DeepSeek-V2, arXiv:2405.04434)."""

    def __init__(self, config: TransformerConfig, latent: Latent) -> None:
        super().__init__()
        self.config, self.latent = config, latent
        plain = config.channels - latent.rotated
        self.q_down = nn.Linear(config.hidden, latent.query, bias=False)
        self.q_norm = RMSNorm(latent.query)
        self.q_proj = nn.Linear(latent.query, config.heads * config.channels, bias=False)
        self.kv_down = nn.Linear(config.hidden, latent.key_value + latent.rotated, bias=False)
        self.kv_norm = RMSNorm(latent.key_value)
        self.k_proj = nn.Linear(latent.key_value, config.heads * plain, bias=False)
        self.v_proj = nn.Linear(latent.key_value, config.heads * latent.value, bias=False)
        self.o_proj = nn.Linear(config.heads * latent.value, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the mixed values ``[batch, sequence, hidden]``."""
        config, latent = self.config, self.latent
        q = self.q_proj(self.q_norm(self.q_down(x))).view(*x.shape[:2], config.heads, -1).transpose(1, 2)
        narrow, position = self.kv_down(x).split((latent.key_value, latent.rotated), dim=-1)
        narrow = self.kv_norm(narrow)
        k, v = (
            proj(narrow).view(*x.shape[:2], config.heads, -1).transpose(1, 2) for proj in (self.k_proj, self.v_proj)
        )
        plain, turned = q.split((config.channels - latent.rotated, latent.rotated), dim=-1)
        q = torch.cat((plain, rotate(turned, cos, sin)), dim=-1)
        position = rotate(position.unsqueeze(1), cos, sin).expand(-1, config.heads, -1, -1)
        mixed = F.scaled_dot_product_attention(q, torch.cat((k, position), dim=-1), v, is_causal=config.causal)
        return self.o_proj(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """The feed-forward part."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        bias = not config.rms_norm
        self.gate_proj = nn.Linear(config.hidden, config.ffn, bias=bias) if config.gated else None
        self.up_proj = nn.Linear(config.hidden, config.ffn, bias=bias)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor like ``x``."""
        if self.gate_proj is not None:
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]
        return self.down_proj(F.gelu(self.up_proj(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer, normalised before each part."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        norm = RMSNorm if config.rms_norm else nn.LayerNorm
        self.attention_norm = norm(config.hidden)
        self.attention = LatentAttention(config, config.latent) if config.latent else Attention(config)
        self.mlp_norm = norm(config.hidden) if config.ffn else None
        self.mlp = MLP(config) if config.ffn else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return a tensor like ``x``."""
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin))
        if self.mlp is None or self.mlp_norm is None:
            return x
        return x + self.dropout(self.mlp(self.mlp_norm(x)))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Tokens and the next tokens to the mean loss."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.positions = None if config.rotary else nn.Embedding(config.sequence, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden) if config.rms_norm else nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        turned = config.latent.rotated if config.latent else config.channels
        self.register_buffer("cos", torch.ones(config.sequence, turned), persistent=False)
        self.register_buffer("sin", torch.ones(config.sequence, turned), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of ``tokens`` ``[batch, sequence]``."""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        if not self.config.causal:
            masked = max(1, self.config.sequence * 5 // 32)
            x, targets = x[:, :masked], targets[:, :masked]
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def build(config: TransformerConfig, batch: int, dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return the model on the meta device with its inputs."""
    with torch.device("meta"):
        model = Transformer(config).to(dtype)
        tokens = torch.empty((batch, config.sequence), dtype=torch.int64)
    return model, (tokens, tokens)
