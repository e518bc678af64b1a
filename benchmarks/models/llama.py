"""A Llama of plain PyTorch modules: RMSNorm, rotary positions, grouped heads, SwiGLU, the loss inside."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes; the defaults are those of Llama-3-8B."""

    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    layers: int = 32
    vocab: int = 128256
    sequence: int = 8192
    theta: float = 500000.0


class RMSNorm(nn.Module):
    """Divide by the root of the mean square of the last dim, in float32, and scale."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` normalised, of its own shape and dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn every pair of channels of ``x`` ``[batch, heads, sequence, channels]`` by its position's angle."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


class Attention(nn.Module):
    """Causal attention of grouped heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.channels = config.hidden // config.heads
        kv_width = config.kv_heads * self.channels
        self.q_proj = nn.Linear(config.hidden, config.hidden, bias=False)
        self.k_proj = nn.Linear(config.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the mixed values ``[batch, sequence, hidden]``."""
        batch, length, _ = x.shape
        q, k, v = (
            proj(x).view(batch, length, -1, self.channels).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``down(silu(gate(x)) * up(x))``."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One block: attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the stream after the block."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """The whole model; it returns the mean loss of the next token."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        channels = config.hidden // config.heads
        angles = 1.0 / config.theta ** (torch.arange(0, channels, 2).float() / channels)
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of ``targets`` ``[batch, sequence]`` given ``tokens``."""
        position = torch.arange(tokens.shape[1], device=tokens.device).float()
        turn = torch.outer(position, self.angles)
        turn = torch.cat((turn, turn), dim=-1)
        x = self.embedding(tokens)
        cos, sin = turn.cos().to(x.dtype), turn.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.view(-1, self.config.vocab), targets.view(-1))


def build(config: LlamaConfig, batch: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Llama, tuple[Tensor, Tensor]]:
    """Return the model and example inputs, both on the meta device."""
    with torch.device("meta"):
        model = Llama(config).to(dtype)
        tokens = torch.empty((batch, config.sequence), dtype=torch.int64)
    return model, (tokens, torch.empty_like(tokens))
