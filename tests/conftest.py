"""Settings of the whole test run.

Hypothesis profiles: ``default`` draws the same examples in every run; ``--hypothesis-profile=deep`` draws thousands of
fresh ones. A test that needs more examples than the profile says multiplies ``settings.default.max_examples``, so that
both profiles scale it.
"""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

_SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)

settings.register_profile(
    "default", max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=_SLOW
)
settings.register_profile(
    "deep", max_examples=3000, deadline=None, derandomize=False, print_blob=True, suppress_health_check=_SLOW
)
settings.load_profile("default")

torch.set_num_threads(1)
