"""Run the passes over the segments of stages."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autopar.mesh import Mesh

from ..stage_pieces import StagedProgram
from .improve import improve
from .setting import Setting


def improve_stages(
    ranks: Sequence[StagedProgram], mesh: Mesh, memory_bytes: int | None, disable: Collection[str] = ()
) -> None:
    """Change the segments of every stage in place; see ``improve``. What a segment takes and gives stays the same.

    Args:
        ranks: the pieces of the first rank of a stage's mesh, then those of others.
        mesh: of a stage.
        memory_bytes: the budget of a rank: with one, nothing moves that would take memory, because what else is alive
            while a segment runs is not known here.
        disable: names of passes that are left out.
    """
    setting = Setting(mesh, (), (), memory_bytes=memory_bytes)
    for stage, pieces in enumerate(ranks[0].stages):
        for when in pieces.segments:
            modules = [rank.stages[stage].segments[when].graph_module for rank in ranks]
            improve(modules, setting, disable)
            for module in modules:
                module.recompile()
