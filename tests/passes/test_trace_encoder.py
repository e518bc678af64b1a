"""The nested tensors of ``nn.TransformerEncoder``: a program leaves what eager leaves where tokens are hidden."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.mesh import Mesh
from autopar.passes.pipeline import make_plan
from autopar.plans import Options
from autopar.runtime.simulated_module import SimulatedModule

ALIGNED = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 1, 1, 1, 1]]).bool()
HOLES = torch.tensor([[0, 0, 0, 0, 0], [1, 0, 0, 1, 1], [0, 0, 1, 0, 0]]).bool()


@pytest.mark.parametrize("hidden", [ALIGNED, HOLES], ids=["aligned", "holes"])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("gradients", [False, True], ids=["inference", "gradients"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_hidden_tokens(hidden: Tensor, normed: bool, gradients: bool) -> None:
    """Equal to one device at every token, whichever path eager takes."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8) if normed else None).eval()
    if model.norm is not None:
        nn.init.normal_(model.norm.bias)
    x = torch.randn(3, 5, 8)
    parallel = SimulatedModule(model, Mesh((2,)), lambda program, mesh: make_plan(program, mesh, Options()))
    with torch.set_grad_enabled(gradients):
        expected, found = model(x, src_key_padding_mask=hidden), parallel(x, src_key_padding_mask=hidden)
    assert bool((expected[hidden] == 0).all()) == (hidden is ALIGNED and not normed and not gradients)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
