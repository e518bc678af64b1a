"""Regions of captured models, and their prices: together what the plan costs."""

from __future__ import annotations

import pytest
import torch

from autopar.mesh import Mesh
from autopar.passes.capture import capture
from autopar.passes.find_regions import find_regions, region_of
from autopar.passes.pipeline import make_plan
from autopar.passes.price_regions import PricedRegion, price_regions, repeat_regions
from autopar.passes.program import Program
from autopar.plans import Options
from benchmarks.models.transformer import TransformerConfig, build

MESH = Mesh((4,), ("inner",), "h100", ("nvlink4",))


def program(layers: int, **switches: bool) -> Program:
    """Return a captured transformer."""
    config = TransformerConfig(layers, 256, 4, 4, 64, 1024, 512, 128, **switches)
    model, args = build(config, 2, torch.bfloat16)
    return capture(model, args, {})


@pytest.fixture(scope="module")
def gpt() -> Program:
    """Return a GPT of three layers whose head is its own."""
    return program(3, tied=False)


def test_regions_are_the_modules(gpt: Program) -> None:
    """Embeddings, every layer, the norm and the head are regions; every node is in one."""
    spans = find_regions(gpt)
    assert [span.name for span in spans] == ["embedding", "layers.0", "layers.1", "layers.2", "norm", "head"]
    at = region_of(gpt, spans)
    assert {node.name for node in gpt.graph.nodes if node.op != "output"} == set(at)
    for role in gpt.inputs:
        if role.kind == "parameter":
            assert role.name.replace("positions", "embedding").startswith(spans[at[role.node]].name)


def test_prices_add_up_to_the_plan(gpt: Program) -> None:
    """Forward and backward of all regions take what the plan takes, compute and collectives alike."""
    plan = make_plan(gpt, MESH, Options())
    regions = price_regions(gpt, MESH, Options())
    works = [work for region in regions for work in (region.forward, region.input, region.weight)]
    assert sum(work.seconds for work in works) == pytest.approx(plan.step_seconds)
    assert sum(work.moves for work in works) == pytest.approx(plan.cost.communication_seconds)


def test_layers_are_alike(gpt: Program) -> None:
    """Layers have one kind and one price; backward work for weights is found and is about the forward's products."""
    regions = price_regions(gpt, MESH, Options())
    layers = [region for region in regions if region.name.startswith("layers")]
    assert len({(region.kind, region.forward, region.input, region.weight) for region in layers}) == 1
    assert layers[0].weight.products == pytest.approx(layers[0].forward.products, rel=0.1)
    assert layers[0].saved_bytes > layers[0].light_bytes > layers[0].input_bytes > 0
    assert regions[-1].send_bytes == 0 < regions[1].send_bytes


def test_a_shallow_model_prices_a_deep_one(gpt: Program) -> None:
    """Two layers, one of them repeated, cost what the same number of captured layers cost."""

    def total(regions: tuple[PricedRegion, ...]) -> float:
        return sum(region.forward.seconds + region.input.seconds + region.weight.seconds for region in regions)

    shallow = repeat_regions(price_regions(program(2, tied=False), MESH, Options()), {"layers.0": 2})
    deep = price_regions(gpt, MESH, Options())
    assert [region.name for region in shallow] == ["embedding", "layers.0", "layers.0", "layers.1", "norm", "head"]
    assert total(shallow) == pytest.approx(total(deep), rel=0.02)


def test_skips_cross_every_cut() -> None:
    """What a later region reads crosses all cuts before it."""

    class Skip(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.blocks[0](x)
            second = self.blocks[1](first).relu()
            return (self.blocks[2](second) + first).sum()

    captured = capture(Skip(), (torch.zeros(8, 64),), {})
    sends = [region.send_bytes for region in price_regions(captured, Mesh((1,), device="h100"), Options())]
    assert sends == [8 * 64 * 4, 2 * 8 * 64 * 4, 0]
