"""The models of the zoo: unmodified architectures from installed packages at small sizes, and a few written here."""

from __future__ import annotations

from importlib import import_module

from benchmarks.zoo_models.case import REGISTRY, Case

PARTS = (
    "text_decoders",
    "text_encoders",
    "experts_and_states",
    "vision",
    "audio",
    "multimodal",
    "torchvision_models",
    "timm_models",
    "diffusion",
    "written",
)
"""Module names below ``benchmarks.zoo_models``; each enters its cases into the registry."""


def load() -> dict[str, Case]:
    """Return all cases by name, in the order of the parts. No model library is imported."""
    for part in PARTS:
        import_module(f"benchmarks.zoo_models.{part}")
    return REGISTRY
