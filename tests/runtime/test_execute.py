"""Parts of the execution that need no processes; programs run in tests/processes."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import InputError
from autopar.runtime.own_memory import Owned
from autopar.runtime.versions import require_unchanged


def test_gradients_own_their_memory() -> None:
    """A gradient that shares memory with another, with a saved tensor, or is expanded, is copied."""
    saved, gradient = torch.ones(2, 2), torch.ones(2, 2)
    own = Owned([saved])
    assert own.take(gradient) is gradient
    for shared in (gradient, gradient.view(4), saved, torch.ones(1).expand(3), torch.ones(2, 3).t()):
        copy = own.take(shared)
        assert torch.equal(copy, shared)
        assert copy.is_contiguous()
        assert copy.untyped_storage().data_ptr() != shared.untyped_storage().data_ptr()


def test_changed_parameter() -> None:
    """A parameter that changed since the forward is refused by its name."""
    tensor = torch.ones(2)
    versions = [("layer.weight", tensor, tensor._version)]
    require_unchanged(versions)
    tensor.add_(1)
    with pytest.raises(InputError, match=r"layer\.weight was changed in place"):
        require_unchanged(versions)
