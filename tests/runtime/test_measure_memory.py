"""Measuring live bytes of real code."""

from __future__ import annotations

import torch
from torch import nn

from autopar.runtime.measure_memory import MemoryMeter, state_tensors


def test_a_training_step_by_purpose() -> None:
    """Parameters, state and inputs lie there; what the forward leaves is saved; gradients come in the backward."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 1, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(100, 64)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    meter = MemoryMeter()
    meter.hold_module(model, optimizer)
    meter.hold("inputs", [x])
    with meter:
        loss = model(x).sum()
        meter.hold("outputs", [loss])
        meter.hold_rest("saved")
        loss.backward()
    meter.hold("gradients", [parameter.grad for parameter in model.parameters()])
    found = meter.result()
    weights = 64 * 64 * 4 + 64 * 4
    assert found.parts["parameters"] == weights
    assert found.parts["optimizer"] == 2 * weights + 2 * 4
    assert found.parts["inputs"] == 100 * 64 * 4
    assert found.parts["saved"] >= 100 * 64 * 4
    assert found.peak_bytes == sum(found.parts.values())


def test_the_profiler_sees_the_same() -> None:
    """Torch's own profiler, which sees every allocation, finds the same highest moment."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 8))
    x = torch.randn(32, 64)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        model(x).square().sum().backward()

    step()
    for parameter in model.parameters():
        parameter.grad = None
    meter = MemoryMeter()
    meter.hold_module(model)
    meter.hold("inputs", [x])
    resting = meter.result().peak_bytes
    with meter:
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for parameter in model.parameters():
            parameter.grad = None
        freed = sum(parameter.numel() * 4 for parameter in model.parameters())
        step()
    live = peak = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert freed > 0
    assert abs(meter.result().peak_bytes - resting - peak) <= 0.02 * peak


def test_state_tensors() -> None:
    """Every tensor of the state is found, scalars too."""
    parameter = torch.ones(3, requires_grad=True)
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.Adam([parameter])
    optimizer.step()
    assert sum(tensor.nbytes for tensor in state_tensors(optimizer)) == 2 * 12 + 4
