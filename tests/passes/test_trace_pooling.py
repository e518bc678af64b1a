"""Pooling to one number a channel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.nn.functional as F
from torch import Tensor

from tests.verified import verified_function


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.adaptive_avg_pool1d(x.view(2, 3, 4), 1).flatten(1).tanh(),
        lambda x: F.adaptive_avg_pool2d(x.view(2, 3, 2, 2), 1).flatten(1).tanh(),
        lambda x: F.adaptive_avg_pool2d(x.view(2, 3, 4, 1), (1, None)).flatten(1).tanh(),
        lambda x: F.adaptive_avg_pool3d(x.view(2, 3, 2, 2, 1), (1, 1, 1)).flatten(1).tanh(),
        lambda x: F.adaptive_avg_pool2d(x.view(2, 3, 2, 2), (2, 1)).flatten(1).tanh(),
    ],
)
def test_adaptive_pools(function: Callable[[Tensor], Tensor]) -> None:
    """No op that looks at memory is left, whatever lies how."""
    program = verified_function(function)
    assert not [node for node in program.ops() if "as_strided" in str(node.target)]
