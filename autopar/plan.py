"""The old place of ``autopar.plans``: ``autopar.plan`` is the function that makes a plan, and this goes away."""

from __future__ import annotations

from autopar.plans import *  # noqa: F403
