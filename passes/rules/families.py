"""The families of rules; loading them fills the table."""

from __future__ import annotations

from importlib import import_module

FAMILIES: tuple[str, ...] = (
    "contract",
    "elementwise",
    "reductions",
    "views",
    "slicing",
    "factories",
    "indexing",
    "advanced_indexing",
    "norms",
    "convolution",
    "attention",
    "ctc",
    "micro_batches",
)
"""Module names below ``autopar.passes.rules``, one an op family."""


def load() -> None:
    """Import every family, which enters its rules into the table. Safe to call again."""
    for name in FAMILIES:
        import_module(f"autopar.passes.rules.{name}")
