"""``nn.TransformerEncoder`` without gradients leaves zeros where a padding mask hides tokens; so does its trace.

In eval mode eager PyTorch takes padded tokens out (a nested tensor) where every row of the mask hides its end, and puts
zeros in their place; otherwise it computes something for them. Which of both depends on the mask's values.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType

import torch
from torch import Tensor, nn


def padded_encoder(frame: FrameType | None, valid: Tensor) -> tuple[nn.Module, Callable[[Tensor], Tensor]] | None:
    """Return the encoder that asks whether ``valid`` is aligned, and what to do to its result; None for another path.

    Args:
        frame: where it asks.
        valid: ``[batch, tokens]``, true where a token is there.
    """
    while frame is not None and frame.f_code is not nn.TransformerEncoder.forward.__code__:
        frame = frame.f_back
    if frame is None:
        return None
    encoder, src = frame.f_locals["self"], frame.f_locals["src"]
    tensors = [src, *encoder.layers[0].parameters()]
    if frame.f_locals["mask"] is not None or torch.is_autocast_enabled():
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None

    def emptied(result: Tensor) -> Tensor:
        aligned = (valid[:, :-1] | ~valid[:, 1:]).all()
        nothing = torch.zeros_like(result)
        if encoder.norm is not None:
            nothing = encoder.norm(nothing)
        return torch.where((aligned & ~valid).unsqueeze(-1), nothing, result)

    return encoder, emptied
