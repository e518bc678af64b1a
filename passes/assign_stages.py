"""Say which stage every forward op of a program belongs to, given where the model is cut."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.errors import OptionError

from .program import Program, is_getitem
from .rules.micro_batches import MICRO_BATCH


def assign_stages(program: Program, cuts: Sequence[str]) -> dict[str, int]:
    """Return forward op node -> stage. A cut is the name of the first forward op of the next stage, in graph order.

    With K - 1 cuts there are K stages. A cut may be the path of a module too: the stage then starts with the module's
    first op. Backward ops follow their forward ops (``cut_stages``); masks and other values of inputs alone are
    computed again where they are read.

    Raises:
        OptionError: a cut names no forward op, or cuts are not in the order of the graph.

    >>> assign_stages(program, ["layers.2"])  # doctest: +SKIP
    {'embedding': 0, ..., 'contract_12': 1, ...}
    """
    ops = [node for node in program.ops() if node.meta["phase"] == "forward"]
    starts = [_start(ops, cut) for cut in cuts]
    for cut, one, other in zip(cuts, [-1, *starts], starts):
        if other <= one:
            raise OptionError(
                f"the stage that starts at {cut!r} would be empty or come before the one before it; give cuts in the "
                "order in which the model runs"
            )
    if starts and all(node.target is MICRO_BATCH for node in ops[: starts[0]]):
        raise OptionError(f"a stage that ends before {cuts[0]!r} is empty: that is where the model starts")
    stages: dict[str, int] = {}
    stage = 0
    for position, node in enumerate(ops):
        while stage < len(starts) and position >= starts[stage]:
            stage += 1
        stages[node.name] = stage
    for node in program.graph.nodes:
        if is_getitem(node) and isinstance(node.args[0], fx.Node) and node.args[0].name in stages:
            stages[node.name] = stages[node.args[0].name]
    return stages


def _start(ops: Sequence[fx.Node], cut: str) -> int:
    names = {node.name: i for i, node in enumerate(ops)}
    if cut in names:
        return names[cut]
    for i, node in enumerate(ops):
        module = str(node.meta.get("module", ""))
        if module == cut or module.startswith(f"{cut}."):
            return i
    modules = sorted({str(node.meta.get("module", "")) for node in ops} - {""})
    raise OptionError(
        f"no stage can start at {cut!r}: it is neither a forward op nor a module that computes something; modules are "
        f"{', '.join(modules[:12])}{', ...' if len(modules) > 12 else ''}"
    )
