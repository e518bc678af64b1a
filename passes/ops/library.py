"""The op library ``autopar``."""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("autopar", "FRAGMENT")
"""Holds every definition; the ops live as long as it does."""
