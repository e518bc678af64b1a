"""The custom ops of captured programs, ``torch.ops.autopar.*``: importing this package defines them."""

from . import attention, bernoulli, contract, ctc, micro_batches, norms, random_state  # noqa: F401  (defines the ops)
