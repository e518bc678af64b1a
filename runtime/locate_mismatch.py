"""Find the first op whose value, put together again from all ranks, differs from the global graph's own value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.errors import MismatchError
from autopar.passes.local_program import LocalProgram
from autopar.passes.program import Program
from autopar.placement import Layout, layout_name
from autopar.plans import Plan

from .simulate import assemble, simulate_step


@dataclass(frozen=True)
class Tolerance:
    """How far two tensors may be apart: ``relative`` times the largest entry, plus ``absolute``."""

    relative: float
    absolute: float = 0.0

    def excess(self, expected: torch.Tensor, found: torch.Tensor) -> float | None:
        """Return the largest absolute difference when it is beyond the tolerance, else None.

        A value that is not a number, or infinite, on one side only is an infinite difference.
        """
        if expected.numel() == 0:
            return None
        if expected.dtype == torch.bool or not (expected.is_floating_point() or expected.is_complex()):
            gap = float((expected.to(torch.float64) - found.to(torch.float64)).abs().max())
            return gap or None
        wide = torch.complex128 if expected.is_complex() else torch.float64
        a, b = expected.to(wide), found.to(wide)
        both = (a == b) | (a.isnan() & b.isnan())
        gaps = torch.where(both, torch.zeros_like(a.abs()), (a - b).abs()).nan_to_num(
            nan=float("inf"), posinf=float("inf")
        )
        finite = a.abs()[a.isfinite()]
        scale = float(finite.max()) if finite.numel() else 0.0
        gap = float(gaps.max())
        return gap if gap > self.relative * scale + self.absolute else None


@dataclass
class _Version:
    """One layout of one tensor, as every rank holds it."""

    layout: Layout
    pieces: list[torch.Tensor]
    arrived_by: str


def locate_mismatch(
    program: Program,
    plan: Plan,
    programs: Sequence[LocalProgram],
    values: Mapping[str, torch.Tensor],
    tolerance: Tolerance,
    seed: int,
) -> str:
    """Return a sentence that names the first op, in graph order, that a plan computes wrongly.

    Args:
        programs: the lowered programs, in rank order.
        values: placeholder name -> global tensor.
        seed: both runs draw their random numbers from it.
    """
    torch.manual_seed(seed)
    recorder = _Recorder(program.graph_module)
    recorder.run(*(values[role.node] for role in program.inputs))
    versions: dict[str, list[_Version]] = {}

    def watch(node: fx.Node, results: list[Any]) -> None:
        if "tensor" in node.meta and node.op != "placeholder" and isinstance(results[0], torch.Tensor):
            pieces = [result.clone() for result in results]  # what follows may write into them
            seen = _Version(node.meta["layout"], pieces, str(node.meta.get("reason", "")))
            versions.setdefault(node.meta["tensor"], []).append(seen)

    torch.manual_seed(seed)
    with suppress(MismatchError):  # replicas that differ: the op that made them differ is found below
        simulate_step(programs, values, watch=watch)
    for node in program.graph.nodes:
        expected = recorder.values.get(node.name)
        if not isinstance(expected, torch.Tensor):
            continue
        for version in versions.get(node.name, ()):
            fault = _fault(expected, version, programs, tolerance)
            if fault is not None:
                return _sentence(node, plan, version, fault)
    return "No op differs from the captured graph run whole: the capture differs from the original module."


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps every value."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.values[n.name] = result
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run an op; views as lowered programs do, whatever lies how in memory."""
        if target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            target = torch.ops.aten.reshape.default
        return super().call_function(target, args, kwargs)


def _fault(
    expected: torch.Tensor, version: _Version, programs: Sequence[LocalProgram], tolerance: Tolerance
) -> str | None:
    try:
        found = assemble(version.pieces, version.layout, expected.shape, programs[0].mesh)
    except MismatchError as error:
        return str(error)
    gap = tolerance.excess(expected, found)
    return None if gap is None else f"it differs by {gap:.3g} where the largest entry is {_largest(expected):.3g}"


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.dtype != torch.bool else 1.0


def _sentence(node: fx.Node, plan: Plan, version: _Version, fault: str) -> str:
    owner = node.args[0] if node.name not in plan.choices and node.args else node
    name = owner.name if isinstance(owner, fx.Node) else node.name
    choice = ", ".join(plan.choices.get(name, ())) or "none"
    where = f" in {node.meta['module']}" if node.meta.get("module") else ""
    line = f" at {node.meta['source']}" if node.meta.get("source") else ""
    moved = f", after it was {version.arrived_by}" if version.arrived_by else ""
    return (
        f"The first op that differs is {node.name} ({node.target}){where}{line}, split by ({choice}), held as "
        f"{layout_name(version.layout)}{moved}: {fault}."
    )
