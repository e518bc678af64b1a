"""What the ranks of a pool run: a fault case on real processes beside one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import autopar
from autopar.errors import AutoparError
from benchmarks.fault_cases import load_cases
from tests.processes.compare import full

FILE = Path(__file__).resolve().parents[1] / "cases" / "fault_cases.py"


class Whole(nn.Module):
    """A parallel module whose outputs are whole wherever they lie, as the cases compare them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs as plain tensors. Collective."""
        return pytree.tree_map_only(torch.Tensor, full, self.inner(*args, **kwargs))

    def parameters(self, recurse: bool = True) -> Any:
        """Return those of the module."""
        return self.inner.parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Return those of the module, by its names."""
        return self.inner.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        """Return those of the module, by its names."""
        return self.inner.named_buffers(*args, **kwargs)


def run_fault_case(name: str, sizes: tuple[int, ...]) -> tuple[str, str]:
    """Return ``(result, detail)`` of a case, as ``benchmarks/fault_cases.py`` names them. Collective."""
    cases = load_cases(FILE)
    made = []
    for split in (False, True):
        torch.manual_seed(0)
        case = cases.REG[name]["fn"]()
        if split:
            case["model"] = Whole(autopar.parallelize(case["model"], sizes))
        try:
            found = cases.reference(case)
        except AutoparError as error:
            allowed = case.get("expect") == "match_or_refuse"
            return ("refused_allowed" if allowed else "refused"), f"{type(error).__name__}: {error}"
        made.append(pytree.tree_map_only(torch.Tensor, full, found))
    if case.get("expect") == "property":
        case["check"](made[1])
        return "match", ""
    faults = cases.compare(*made, case.get("tol", 2e-4), case.get("none_ok", ()), case.get("loss_tol"))
    return ("wrong", "; ".join(faults[:3])) if faults else ("match", "")
