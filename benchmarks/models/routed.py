"""Routed experts as one rank of an expert-parallel group computes them, in plain PyTorch modules.

Loads are balanced: every local expert has the same number of rows. What lies between ranks (the exchange of rows) is no
part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.transformer import RMSNorm


@dataclass(frozen=True)
class RoutedConfig:
    """Sizes of a rank's part.

    Attributes:
        tokens: that the rank routes.
        rows: that its experts compute, of all ranks; as many for each of them.
        hidden: width of a token.
        ffn: width inside an expert, on this rank.
        experts: of the layer, which the router tells apart.
        local: experts of this rank.
        top_k: experts of a token.
        gated: three matrices an expert instead of two with GELU.
        norm: the layer's norm and its residual are a part of it; else they belong to a shared expert beside it.
    """

    tokens: int
    rows: int
    hidden: int
    ffn: int
    experts: int
    local: int
    top_k: int
    gated: bool = True
    norm: bool = True


class RoutedExperts(nn.Module):
    """Router, dispatch, products of groups, combination."""

    def __init__(self, config: RoutedConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = RMSNorm(config.hidden) if config.norm else None
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        shape = (config.local, config.hidden, config.ffn)
        self.gate = nn.Parameter(torch.zeros(shape)) if config.gated else None
        self.up = nn.Parameter(torch.zeros(shape))
        self.down = nn.Parameter(torch.zeros(config.local, config.ffn, config.hidden))

    def forward(self, x: Tensor, sent: Tensor, returned: Tensor) -> Tensor:
        """Return a tensor like ``x`` ``[tokens, hidden]``.

        ``sent`` ``[rows]`` says which token a row is of, ``returned`` ``[tokens * top_k]`` where its results lie.
        """
        config = self.config
        inside = x if self.norm is None else self.norm(x)
        weights = self.router(inside).float().softmax(-1)[:, : config.top_k].to(x.dtype)
        rows = inside.index_select(0, sent).view(config.local, -1, config.hidden)
        if self.gate is None:
            rows = F.gelu(rows @ self.up)
        else:
            rows = F.silu(rows @ self.gate) * (rows @ self.up)
        rows = (rows @ self.down).view(-1, config.hidden).index_select(0, returned)
        rows = rows.view(config.tokens, config.top_k, config.hidden) * weights.unsqueeze(-1)
        return x + rows.sum(1)  # type: ignore[no-any-return]


class RoutedLayers(nn.Module):
    """Two layers of experts and a loss, so that both halves of a step are captured."""

    def __init__(self, config: RoutedConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1, config.hidden)
        self.layers = nn.ModuleList(RoutedExperts(config) for _ in range(2))

    def forward(self, tokens: Tensor, sent: Tensor, returned: Tensor) -> Tensor:
        """Return a loss of ``tokens`` ``[tokens]``."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, sent, returned)
        return x.float().mean()  # type: ignore[no-any-return]


def build(config: RoutedConfig, dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, Tensor, Tensor]]:
    """Return the layers on the meta device with their inputs."""
    with torch.device("meta"):
        model = RoutedLayers(config).to(dtype)
        counts = (config.tokens, config.rows, config.tokens * config.top_k)
        tokens, sent, returned = (torch.empty(count, dtype=torch.int64) for count in counts)
    return model, (tokens, sent, returned)
