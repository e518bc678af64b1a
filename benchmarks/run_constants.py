"""The constants of the predictions of published runs: one set for all rows. Where each is from: ``docs/costs.md``."""

from __future__ import annotations

from dataclasses import dataclass, field


def _shares() -> dict[tuple[str, str, bool], float]:
    return {
        ("unfused", "", False): 0.57,
        ("first", "ampere", False): 0.38,
        ("first", "ampere", True): 0.35,
        ("first", "hopper", False): 0.215,
        ("first", "hopper", True): 0.245,
        ("second", "ampere", False): 0.62,
        ("second", "ampere", True): 0.7,
        ("second", "hopper", False): 0.4,
        ("second", "hopper", True): 0.36,
        ("second", "cdna", False): 0.4,
        ("second", "cdna", True): 0.44,
        ("tuned", "hopper", False): 0.7,
        ("tuned", "hopper", True): 0.8,
        ("second", "blackwell", False): 0.3,
        ("second", "blackwell", True): 0.4,
        ("tuned", "blackwell", False): 0.6,
        ("tuned", "blackwell", True): 0.59,
    }


@dataclass(frozen=True)
class Constants:
    """What the arithmetic of ``passes.cost`` does not know of a whole training step and of its software.

    Attributes:
        sustained: part of the speed of single kernels that a step sustains, by device or else by its generation: power
            and heat lower the clock.
        attention: part of the achievable rate of matrix products that attention reaches, by kernel, generation of the
            device and whether heads have more than 64 channels.
        eager_fine, eager, eager_old: memory traffic of frameworks that run op by op, in that of the captured graph:
            where its norms and rotations are many small ops, where they are one, and that before PyTorch 2.0.
        autocast: memory traffic under autocast in that of 16 bits, while norms and casts run in float32.
        loss_bytes: moved for each logit by a loss of single kernels and by one that runs as one kernel.
        hand, hand_fine: memory traffic of kernels that were fused by hand, in that of the captured graph fused by a
            compiler: they end at norms and residuals, norms read again for the gradients of their weights. LayerNorm
            with biases and dropout; RMSNorm.
        score_bytes: moved for each attention score that passes through memory, forward and backward: product, scale
            and mask, softmax, dropout, product.
        loose_score_bytes: the same where scale, mask and softmax are kernels of their own.
        narrow: part of the rate of 16 bits, scaled by the peaks, that products of 8 or 4 bits reach, by generation of
            the device where it is not 1.
        rowwise: part of that rate that they reach when each row has its own scale.
        cast_times: times that operands of such products are read, in 16 bits, to be cast and transposed.
        adam_bytes: moved for each element of a rank's share: moments, master copy and gradient read, all but the last
            written.
        accumulate_bytes: moved to add an element of a gradient to the float32 sum, by a kernel of its own or by the
            product that makes it, which hides most of it.
        host_s: what the host needs to launch an op without a graph.
        hide_share: part of the backward behind which gradients can hide: the first bucket must be full.
        tensor_hidden: part of the tensor-parallel transfers that hides where a framework overlaps them.
        early_gather: part of one network port that gathers of single tensors reach, without prefetch.
        send_exposed: part of the transfers between stages that is not hidden.
        expert_host_s: what the host needs for a layer with experts, forward and backward, where it launches kernel
            after kernel and waits for the counts of rows.
        expert_casts: bytes that casts of routed rows move, in those of reading them: no norm before them makes them
            narrow.
        expert_hidden: part of the exchange of rows that hides where a framework overlaps it: where the host launches
            kernel after kernel, and where it launches graphs.
    """

    sustained: dict[str, float] = field(
        default_factory=lambda: {
            "volta": 0.95,
            "ampere": 0.91,
            "hopper": 0.88,
            "blackwell": 0.84,
            "gb200": 0.84,
            "gb300": 1.0,
            "cdna": 0.6,
        }
    )
    attention: dict[tuple[str, str, bool], float] = field(default_factory=_shares)
    eager_fine: float = 1.0
    eager: float = 1.55
    eager_old: float = 2.3
    autocast: float = 1.5
    loss_bytes: tuple[float, float] = (85.0, 10.0)
    hand: float = 1.4
    hand_fine: float = 1.2
    score_bytes: tuple[float, float] = (11.0, 17.0)
    loose_score_bytes: tuple[float, float] = (21.0, 21.0)
    narrow: dict[str, float] = field(default_factory=lambda: {"cdna": 0.76})
    rowwise: float = 0.8
    cast_times: float = 1.0
    adam_bytes: float = 30.0
    accumulate_bytes: tuple[float, float] = (10.0, 3.0)
    host_s: float = 8e-6
    hide_share: float = 0.85
    tensor_hidden: float = 0.7
    early_gather: float = 0.78
    send_exposed: float = 0.45
    expert_host_s: tuple[float, float] = (3.7e-3, 5.8e-3)
    expert_casts: float = 2.0
    expert_hidden: tuple[float, float] = (0.5, 0.85)

    def sustained_by(self, device: str, generation: str) -> float:
        """Return what a device sustains: its own figure, or that of its generation."""
        return self.sustained.get(device, self.sustained[generation])

    def attention_share(self, kernel: str, generation: str, wide: bool) -> float:
        """Return the share of a kernel; one that nothing was measured of counts as FlashAttention-2 there."""
        for key in ((kernel, generation, wide), ("second", generation, wide), ("second", "ampere", wide)):
            if key in self.attention:
                return self.attention[key]
        return self.attention["unfused", "", False]


CONSTANTS = Constants()
