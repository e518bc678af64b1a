"""Models of other families in plain PyTorch: vision, encoder and decoder, recommendation, mixture of experts.

Each returns its mean loss. Sizes are arguments, so that tests build small ones.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Attention of ``heads`` heads, of ``x`` to itself or to a ``memory``."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor | None = None, causal: bool = False) -> Tensor:
        """Return the mixed values ``[batch, sequence, hidden]``."""
        memory = x if memory is None else memory
        q, k, v = (
            proj(y).view(*y.shape[:2], self.heads, -1).transpose(1, 2)
            for proj, y in ((self.q_proj, x), (self.k_proj, memory), (self.v_proj, memory))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))
        return out


class FeedForward(nn.Module):
    """Two layers with GELU."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor like ``x``."""
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """One layer, normalised before each part; with ``cross`` it attends to a memory as well."""

    def __init__(self, hidden: int, heads: int, ffn: int, causal: bool = False, cross: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.attention_norm, self.attention = nn.LayerNorm(hidden), Attention(hidden, heads)
        self.cross_norm = nn.LayerNorm(hidden) if cross else None
        self.cross = Attention(hidden, heads) if cross else None
        self.mlp_norm, self.mlp = nn.LayerNorm(hidden), FeedForward(hidden, ffn)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Return a tensor like ``x``."""
        x = x + self.attention(self.attention_norm(x), causal=self.causal)
        if self.cross is not None and self.cross_norm is not None:
            x = x + self.cross(self.cross_norm(x), memory)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class EncoderDecoder(nn.Module):
    """A translator: an encoder, a causal decoder that attends to it, one embedding for both and the head."""

    def __init__(self, layers: int, hidden: int, heads: int, ffn: int, vocab: int, sequence: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.positions = nn.Parameter(torch.zeros(sequence, hidden))
        self.encoder = nn.ModuleList(Block(hidden, heads, ffn) for _ in range(layers))
        self.decoder = nn.ModuleList(Block(hidden, heads, ffn, causal=True, cross=True) for _ in range(layers))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of ``labels`` ``[batch, sequence]``."""
        memory = self.embedding(source) + self.positions
        for block in self.encoder:
            memory = block(memory)
        memory = self.encoder_norm(memory)
        x = self.embedding(target) + self.positions
        for block in self.decoder:
            x = block(x, memory)
        logits = F.linear(self.decoder_norm(x), self.embedding.weight).float()
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


class VisionTransformer(nn.Module):
    """Patches, layers, the mean of all positions, a classifier."""

    def __init__(self, layers: int, hidden: int, heads: int, ffn: int, classes: int, image: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, patch, patch)
        self.positions = nn.Parameter(torch.zeros((image // patch) ** 2, hidden))
        self.layers = nn.ModuleList(Block(hidden, heads, ffn) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of ``images`` ``[batch, 3, side, side]``."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.layers:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)).float(), labels)


class Bottleneck(nn.Module):
    """A residual block of three convolutions with batch norms."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(width_in, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or width_in != out:
            self.skip = nn.Sequential(nn.Conv2d(width_in, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[batch, 4 * width, side, side]``."""
        return F.relu(self.skip(x) + self.body(x))


class ResNet(nn.Module):
    """A residual network of bottleneck blocks; ``(3, 4, 6, 3)`` of width 64 is ResNet-50."""

    def __init__(self, depths: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks: list[nn.Module] = []
        width_in = width
        for stage, depth in enumerate(depths):
            for i in range(depth):
                inner = width * 2**stage
                blocks.append(Bottleneck(width_in, inner, 2 if stage and not i else 1))
                width_in = 4 * inner
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width_in, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of ``images`` ``[batch, 3, side, side]``."""
        x = self.blocks(self.stem(images)).mean((2, 3))
        return F.cross_entropy(self.head(x).float(), labels)


class Recommender(nn.Module):
    """A click predictor: big tables of embeddings and dense features into one deep MLP."""

    def __init__(self, tables: int, rows: int, width: int, dense: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Linear(dense, width)
        sizes = [(tables + 1) * width, *hidden]
        self.top = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.head = nn.Linear(sizes[-1], 1)

    def forward(self, dense: Tensor, ids: Tensor, clicks: Tensor) -> Tensor:
        """Return the mean loss of ``clicks`` ``[batch]`` given features ``[batch, dense]``, ids ``[batch, tables]``."""
        found = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        x = torch.cat((F.relu(self.bottom(dense)), *found), dim=-1)
        for layer in self.top:
            x = F.relu(layer(x))
        return F.binary_cross_entropy_with_logits(self.head(x).squeeze(-1).float(), clicks)


class Experts(nn.Module):
    """A switch layer: every position goes to one expert, which takes ``capacity`` positions of each sequence."""

    def __init__(self, hidden: int, ffn: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.num_experts, self.capacity = experts, capacity
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.zeros(experts, hidden, ffn))
        self.down = nn.Parameter(torch.zeros(experts, ffn, hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor like ``x``; positions that find no room are zero."""
        gates = self.router(x).float().softmax(-1)
        chosen = F.one_hot(gates.argmax(-1), self.num_experts)
        place = (chosen.cumsum(1) - 1) * chosen
        room = F.one_hot(place.sum(-1).clamp(max=self.capacity), self.capacity + 1)[..., : self.capacity]
        sent = (chosen.unsqueeze(-1) * room.unsqueeze(-2)).to(x.dtype)
        weighed = sent * (gates * chosen).sum(-1)[..., None, None].to(x.dtype)
        inside = torch.einsum("bsec,bsh->ebch", sent, x)
        inside = F.gelu(torch.einsum("ebch,ehf->ebcf", inside, self.up))
        inside = torch.einsum("ebcf,efh->ebch", inside, self.down)
        return torch.einsum("bsec,ebch->bsh", weighed, inside)


class ExpertDecoder(nn.Module):
    """A causal decoder whose feed-forward parts are experts."""

    def __init__(self, layers: int, hidden: int, heads: int, ffn: int, experts: int, vocab: int, sequence: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.positions = nn.Parameter(torch.zeros(sequence, hidden))
        self.layers = nn.ModuleList(Block(hidden, heads, ffn, causal=True) for _ in range(layers))
        for block in self.layers:
            assert isinstance(block, Block)
            block.mlp = Experts(hidden, ffn, experts, 2 * sequence // experts)  # type: ignore[assignment]
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of ``targets`` ``[batch, sequence]``."""
        x = self.embedding(tokens) + self.positions
        for block in self.layers:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
