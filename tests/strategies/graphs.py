"""Random models: a recipe is a short list of steps, each a small module on a ``[batch, length, width]`` tensor.

A recipe is drawn compactly (names and small numbers), so that Hypothesis can shrink a failure to the steps that matter.
All values are float64: a plan that is wrong differs by far more than rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

VOCAB = 11


@dataclass(frozen=True)
class Recipe:
    """A model in short.

    Attributes:
        batch, length, width: sizes of the hidden tensor; they need not divide anything.
        start: ``"floats"`` or ``"tokens"`` (an embedding).
        steps: ``(kind, option)`` of every step.
        end: what the model returns: a cross entropy, a mean square, the hidden tensor, or a dict of loss and logits.
    """

    batch: int
    length: int
    width: int
    start: str
    steps: tuple[tuple[str, int], ...]
    end: str

    def build(self) -> tuple[nn.Module, tuple[Any, ...]]:
        """Return the model and its inputs, the same at every call."""
        torch.manual_seed(7)
        model = Generated(self).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        generator = torch.Generator().manual_seed(8)
        shape = (self.batch, self.length)
        if self.start == "tokens":
            x = torch.randint(0, VOCAB, shape, generator=generator)
        else:
            x = torch.randn((*shape, self.width), generator=generator, dtype=torch.float64)
        if self.end not in ("cross_entropy", "dict"):
            return model, (x,)
        y = torch.randint(0, VOCAB, shape, generator=generator)
        y[0, 0] = -100
        return model, (x, y)


@dataclass
class Sizes:
    """What a step may depend on; ``shared`` keeps modules that later steps use again, by width."""

    length: int
    width: int
    shared: dict[int, nn.Linear] = field(default_factory=dict)


class Apply(nn.Module):
    """A step without parameters."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Attention(nn.Module):
    """Self-attention with grouped heads; option picks heads, groups, causality and a mask."""

    def __init__(self, width: int, option: int) -> None:
        super().__init__()
        heads = max(n for n in (1, 2, 3, 4) if width % n == 0 and (option or n == 1))
        self.heads, self.groups = heads, heads if option % 2 == 0 or heads == 3 else heads // 2 or 1
        self.size, self.causal, self.masked = width // heads, option in (0, 1), option == 3
        self.qkv = nn.Linear(width, (heads + 2 * self.groups) * self.size)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = (self.heads, self.groups, self.groups)
        pieces = self.qkv(x).split([n * self.size for n in parts], dim=-1)
        q, k, v = (t.view(batch, length, n, self.size).transpose(1, 2) for t, n in zip(pieces, parts))
        mask = torch.arange(length)[:, None] != (torch.arange(length) + 1) % length if self.masked else None
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=self.causal, enable_gqa=self.groups != self.heads
        )
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Mlp(nn.Module):
    """A residual block of norm, up, activation and down."""

    def __init__(self, width: int, option: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width + option), nn.Linear(2 * width + option, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Flat(nn.Module):
    """A linear on the tensor with its leading dims merged."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x.reshape(-1, x.shape[-1]))).view(x.shape)


class Mix(nn.Module):
    """A linear along the sequence."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.linear = nn.Linear(length, length, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.transpose(1, 2)).transpose(1, 2) + x


class Scale(nn.Module):
    """Parameters that broadcast: over channels, over positions, over everything, and a buffer."""

    def __init__(self, length: int, width: int, option: int) -> None:
        super().__init__()
        shape = ((width,), (length, 1), (), (1, length, width))[option]
        self.gain = nn.Parameter(torch.ones(shape))
        self.register_buffer("shift", torch.linspace(-1.0, 1.0, width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.shift


class BatchNorm(nn.Module):
    """Batch norm over channels; its running statistics are buffers that change."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def _pointwise(option: int) -> nn.Module:
    functions: list[Callable[[Tensor], Tensor]] = [
        F.silu,
        lambda x: torch.where(x > 0.1, x, x * 0.3) - x.abs().clamp(max=1.0),
        lambda x: x.exp().log1p() * torch.sigmoid(x),
        lambda x: x.masked_fill(torch.arange(x.shape[1])[:, None] > 1, 0.5) + 1.0,
    ]
    return Apply(functions[option])


def _reduce(option: int) -> nn.Module:
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda x: x - x.mean(1, keepdim=True),
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.1),
        lambda x: x - x.amax(-1, keepdim=True),
        lambda x: x + x.softmax(-1) + x.sum((0, 1)),
    ]
    return Apply(functions[option])


def _views(option: int) -> nn.Module:
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda x: torch.cat([x[..., 1:], x[..., :1]], -1),
        lambda x: x.permute(2, 0, 1).contiguous().flip(0).permute(1, 2, 0),
        lambda x: (
            torch.stack([x, -x], 2).sum(2) + x.unsqueeze(2).expand(-1, -1, 2, -1).reshape(*x.shape[:2], -1)[..., ::2]
        ),
        lambda x: torch.einsum("btd,bsd->bts", x, x).softmax(-1) @ x,
    ]
    return Apply(functions[option])


def _linear(sizes: Sizes, option: int) -> nn.Module:
    out = (sizes.width, 2 * sizes.width, sizes.width + 1, max(3, sizes.width // 2))[option]
    linear = nn.Linear(sizes.width, out, bias=option != 3)
    sizes.width = out
    return linear


def _shared(sizes: Sizes) -> nn.Module:
    return sizes.shared.setdefault(sizes.width, nn.Linear(sizes.width, sizes.width))


STEPS: dict[str, Callable[[Sizes, int], nn.Module]] = {
    "linear": _linear,
    "norm": lambda sizes, option: nn.LayerNorm(sizes.width, elementwise_affine=option != 3),
    "pointwise": lambda sizes, option: _pointwise(option),
    "mlp": lambda sizes, option: Mlp(sizes.width, option),
    "attention": lambda sizes, option: Attention(sizes.width, option),
    "flat": lambda sizes, option: Flat(sizes.width),
    "mix": lambda sizes, option: Mix(sizes.length),
    "scale": lambda sizes, option: Scale(sizes.length, sizes.width, option),
    "reduce": lambda sizes, option: _reduce(option),
    "views": lambda sizes, option: _views(option),
    "shared": lambda sizes, option: _shared(sizes),
    "batch_norm": lambda sizes, option: BatchNorm(sizes.width),
    "dropout": lambda sizes, option: nn.Dropout(0.1 + 0.2 * option),
}


class Generated(nn.Module):
    """The model of a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.end = recipe.end
        self.embed = nn.Embedding(VOCAB, recipe.width) if recipe.start == "tokens" else None
        sizes = Sizes(recipe.length, recipe.width)
        self.steps = nn.ModuleList([STEPS[kind](sizes, option) for kind, option in recipe.steps])
        self.head: nn.Linear | None = None
        if recipe.end in ("cross_entropy", "dict"):
            self.head = nn.Linear(sizes.width, VOCAB, bias=False)
            if self.embed is not None and sizes.width == recipe.width:
                self.head.weight = self.embed.weight

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        if self.embed is not None:
            x = self.embed(x)
        for step in self.steps:
            x = step(x)
        if self.head is None or y is None:
            return x if self.end == "hidden" else x.pow(2).mean()
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        return loss if self.end == "cross_entropy" else {"loss": loss, "logits": logits}


def recipes(max_steps: int = 5) -> st.SearchStrategy[Recipe]:
    """Draw a recipe of at most ``max_steps`` steps."""
    step = st.tuples(st.sampled_from(list(STEPS)), st.integers(0, 3))
    return st.builds(
        Recipe,
        batch=st.sampled_from([2, 3, 4, 6]),
        length=st.sampled_from([2, 4, 5, 8]),
        width=st.sampled_from([4, 6, 8, 12]),
        start=st.sampled_from(["floats", "tokens"]),
        steps=st.lists(step, min_size=1, max_size=max_steps).map(tuple),
        end=st.sampled_from(["square", "cross_entropy", "hidden", "dict"]),
    )
