"""Measure what a CPU makes of single kinds of op: streams by size, attention, convolution, random numbers."""

from __future__ import annotations

import torch

from autopar.passes import ops as _ops  # noqa: F401  (defines torch.ops.autopar)
from autopar.runtime.measure import Meter

STREAM_BYTES = tuple(2**power for power in range(12, 28, 3))
HEADS, LENGTH, CHANNELS = 16, 128, 64
IMAGES = 8
CONVOLUTIONS = ((3, 32, 64, 7, 2), (32, 32, 16, 3, 1), (64, 64, 16, 3, 2), (128, 32, 16, 1, 1))
"""Channels in and out, side, kernel and stride of layers of a residual network: their rates differ threefold."""
DRAWN = 2**16
ENDS_S = 1.0


def stream_curve(meter: Meter, launch_s: float) -> list[list[float]]:
    """Return ``[bytes moved, bytes a second]`` of adding one to tensors of growing size, without the call's own time.

    Args:
        meter: what measures.
        launch_s: of a call on one element, as the same meter has it.
    """
    out = []
    for size in STREAM_BYTES:
        x = torch.ones(size // 4, device=meter.device)
        seconds = meter.seconds(lambda x=x: torch.ops.aten.add.Tensor(x, 1), ENDS_S)  # type: ignore[misc]
        out.append([2.0 * size, 2.0 * size / max(seconds - launch_s, seconds / 10)])
    return out


def measured_shares(meter: Meter) -> tuple[float, float]:
    """Return the flops a second of attention and of convolution, forward and backward together, in float32."""
    return _attention_flops_per_s(meter), _convolution_flops_per_s(meter)


def _attention_flops_per_s(meter: Meter) -> float:
    q, k, v = (torch.rand(1, HEADS, LENGTH, CHANNELS, device=meter.device) for _ in range(3))
    rest = (None, True, CHANNELS**-0.5, 0)

    def work() -> None:
        out, lse = torch.ops.autopar.attention(q, k, v, *rest)
        torch.ops.autopar.attention_backward(out, q, k, v, out, lse, *rest)

    pairs = LENGTH * (LENGTH + 1) / 2
    return 7.0 * HEADS * pairs * 2 * CHANNELS / meter.seconds(work, ENDS_S)


def _convolution_flops_per_s(meter: Meter) -> float:
    layers, flops = [], 0.0
    for channels, out, side, kernel, stride in CONVOLUTIONS:
        image = torch.rand(IMAGES, channels, side, side, device=meter.device)
        weight = torch.rand(out, channels, kernel, kernel, device=meter.device)
        layers.append((image, weight, None, [stride, stride], [kernel // 2, kernel // 2], [1, 1], False, [0, 0], 1))
        flops += 3.0 * 2.0 * IMAGES * channels * out * (side // stride * kernel) ** 2

    def work() -> None:
        for image, weight, *how in layers:
            made = torch.ops.aten.convolution(image, weight, *how)
            torch.ops.aten.convolution_backward(made, image, weight, *how, [True, True, False])

    return flops / meter.seconds(work, ENDS_S)


def draw_seconds(meter: Meter) -> float:
    """Return the seconds of one random truth value of dropout's kind."""
    draw = torch.ops.autopar.bernoulli
    shape = [DRAWN]
    return meter.seconds(lambda: draw(shape, 0.9, torch.float32, meter.device, [0], shape), ENDS_S) / DRAWN
