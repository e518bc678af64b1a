"""Families of models that nothing was written for are captured and equal eager, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from autopar.passes.capture import capture
from autopar.passes.program import check_program
from tests.captured import assert_same_step, run_eager, run_program

TEXT: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
TEXT |= {"intermediate_size": 64, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def mixtral() -> nn.Module:
    """Experts, grouped heads."""
    config = transformers.MixtralConfig(**TEXT, num_key_value_heads=2, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def gemma3() -> nn.Module:
    """A sliding window: masks that depend on no input."""
    config = transformers.Gemma3TextConfig(**TEXT, num_key_value_heads=2, head_dim=8, sliding_window=4)
    return transformers.Gemma3ForCausalLM(config)


def bloom() -> nn.Module:
    """Attention written by hand, with linear biases."""
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4, use_cache=False)
    return transformers.BloomForCausalLM(config)


def mamba() -> nn.Module:
    """A scan over the sequence, and convolutions over it."""
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, use_cache=False)
    return transformers.MambaForCausalLM(config)


def swin() -> nn.Module:
    """Shifted windows: rolls and index tables."""
    config = transformers.SwinConfig(
        image_size=16, patch_size=4, embed_dim=16, depths=[2], num_heads=[2], window_size=2
    )
    return transformers.SwinForImageClassification(config)


@pytest.mark.parametrize("build", [mixtral, gemma3, bloom, mamba, swin], ids=lambda f: f.__name__)
def test_step_equals_eager(build: Callable[[], nn.Module]) -> None:
    """Loss, outputs and every gradient equal eager ones."""
    torch.manual_seed(0)
    model = build().train()
    if build is swin:
        kwargs = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    else:
        kwargs = {"input_ids": torch.randint(3, 64, (2, 8)), "labels": torch.randint(3, 64, (2, 8))}
    program = check_program(capture(model, (), kwargs))
    assert program.loss == 0
    assert_same_step(run_program(program, model, (), kwargs, 1), run_eager(program, model, (), kwargs, 1))
