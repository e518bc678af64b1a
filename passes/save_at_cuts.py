"""Keep what crosses a cut: a stage can't compute again what an earlier stage has computed."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from torch import fx

from autopar.placement import layout_name
from autopar.plans import Plan

from .plan_choices import choices_of
from .program import Program, has_many_results, is_getitem, result_values
from .rules.legality import result_layouts


def save_at_cuts(program: Program, plan: Plan, stages: Mapping[str, int]) -> Plan:
    """Return the plan in which forward ops that a later stage reads are saved instead of computed again.

    Args:
        program: annotated, of a micro-batch.
        stages: forward op -> stage.
    """
    nodes = program.nodes()
    kept = [name for name in plan.recomputed if _crosses(nodes[name], stages)]
    if not kept:
        return plan
    saved = dict(plan.saved)
    for name in kept:
        node = nodes[name]
        layouts = result_layouts(choices_of(node, plan.choices[name], plan.mesh))
        by_index = dict(zip((index for index, _ in result_values(node)), layouts))
        results = [user for user in node.users if is_getitem(user)] if has_many_results(node) else [node]
        for result in results:
            index = result.args[1] if is_getitem(result) else 0
            if index in by_index:
                saved[result.name] = (layout_name(by_index[index]),)  # type: ignore[index]
    again = tuple(name for name in plan.recomputed if name not in kept)
    return msgspec.structs.replace(plan, recomputed=again, saved=saved)


def _crosses(node: fx.Node, stages: Mapping[str, int]) -> bool:
    home = stages.get(node.name)
    readers = [user for result in (node, *node.users) if result is node or is_getitem(result) for user in result.users]
    return home is not None and any(stages.get(reader.name, home) > home for reader in readers)
