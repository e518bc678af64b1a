"""The copy without data, and the loss behind it."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import CaptureError, OptionError
from autopar.runtime.shadow import append_loss, copy_without_data, count_targets


class Tied(nn.Module):
    """An embedding whose table is also the head, and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.head(self.frozen(self.table(ids)))


def test_copy_without_data() -> None:
    """The copy has no data, the same names, ties and flags; the original keeps its own."""
    model = Tied()
    shadow = copy_without_data(model)
    assert all(tensor.is_meta for tensor in [*shadow.parameters(), *shadow.buffers()])
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert shadow.head.weight is shadow.table.weight
    assert not shadow.frozen.weight.requires_grad
    assert list(shadow.state_dict()) == list(model.state_dict())


def test_copy_refused() -> None:
    """A module with something that can't be copied is refused, with what to do."""
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()
    with pytest.raises(CaptureError, match="keep locks, files"):
        copy_without_data(model)


def test_count_targets() -> None:
    """A loss takes as many targets as it has required parameters beyond the first."""
    assert count_targets(F.cross_entropy) == 1
    assert count_targets(nn.CrossEntropyLoss()) == 1
    assert count_targets(lambda output: output.sum()) == 0
    with pytest.raises(OptionError, match="no positional"):
        count_targets(lambda: 0)
    with pytest.raises(OptionError, match="callable"):
        count_targets(3)  # type: ignore[arg-type]


def test_append_loss() -> None:
    """The module then returns its loss, under the same parameter names, and its class stays untouched."""
    model = nn.Sequential(nn.Linear(3, 4))
    x, y = torch.randn(5, 3), torch.randint(0, 4, (5,))
    expected = F.cross_entropy(model(x), y)
    names = list(model.state_dict())
    append_loss(model, F.cross_entropy, 1)
    assert torch.equal(model(x, y), expected)
    assert list(model.state_dict()) == names
    assert nn.Sequential(nn.Linear(3, 4))(x).shape == (5, 4)
