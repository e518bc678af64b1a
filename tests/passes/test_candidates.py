"""Candidates of a search: how they read, and which shapes there are."""

from __future__ import annotations

from autopar.passes.candidates import Candidate, Limits, candidates
from autopar.passes.hardware import Hardware


def test_texts() -> None:
    """A candidate reads as its mesh, schedule and micro-batches."""
    text = str(Candidate(4, 2, (8,), 1, 16, "interleaved_1f1b", 2))
    assert text == "4 stages (interleaved 1F1B of 2) x 2 data x 8 inside, 16 micro-batches of 1"


def test_inner_axes_stay_aligned_with_nodes() -> None:
    """A split inside a stage divides a node or fills whole ones."""
    found = {
        candidate.inner
        for candidate in candidates(Hardware(3, 8, "h100", "nvlink4", "infiniband_400"), 48, 9, Limits())
    }
    assert found == {(), (2,), (4,), (8,)}
