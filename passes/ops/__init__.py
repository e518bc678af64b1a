"""The custom ops of captured programs, ``torch.ops.autopar.*``: importing this package defines them."""

from . import attention, bernoulli, contract  # noqa: F401  (defines the ops)
