"""The meeting of all ranks before a call: same signature, same data, nobody failed; or an error on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from autopar.errors import InputError
from autopar.mesh import Mesh
from autopar.runtime.agree import difference, gather_objects, raise_together
from autopar.runtime.groups import MeshGroups
from autopar.runtime.signature import Call, checksum
from autopar.runtime.stage_groups import StageGroups

_ADVICE = {
    "global": "with inputs='global' every rank passes the same global batch; use inputs='local' for shares",
    "local": "with inputs='local' ranks at the same place of the first mesh axis pass the same share",
}


def meet(
    stage: StageGroups, call: Call | None, error: Exception | None, known: bool, inputs: str
) -> Callable[[], None]:
    """Say to every rank what call this one is about to make; one small collective on the host.

    The contents of tensors are compared too where that is cheap: always on the CPU, on a device at the first call of a
    signature.

    Args:
        stage: the processes; on a mesh with a pipeline axis shares belong to places of the first of the other axes.
        call: this rank's call, or None when it can't be taken apart.
        error: why not.
        known: there is a program for the call.
        inputs: ``"global"`` or ``"local"``.

    Returns:
        What returns when every rank is about to make the same call, and raises on every rank otherwise: an
        ``InputError`` that names what differs, or a rank's error. To be called before any other collective of the call,
        so that nobody waits for a rank that is elsewhere; what a rank computes until then it computes meanwhile.
    """
    groups = stage.whole
    if len(groups.ranks) == 1:
        return partial(_raise, error)
    look = call is not None and (not known or groups.device.type == "cpu")
    signature = call.signature.word if call is not None else 0
    data = checksum(call.leaves) if call is not None and look else 0
    take = _hand_in(groups, [0 if error is None else 1, signature, data])

    def agree() -> None:
        failed, signatures, contents = take()
        if any(failed):
            raise_together(groups.control, "the call", error)
        assert call is not None
        if len(set(signatures)) > 1:
            lines = gather_objects(groups.control, call.signature.lines)
            raise InputError(f"{difference('the call', lines)}; every rank must make the same call")
        for rank, content in enumerate(contents):
            first = 0 if inputs == "global" else _first_of_share(groups.mesh, rank)
            if content != contents[first]:
                raise InputError(
                    f"the input tensors of rank {rank} have other contents than those of rank {first}: "
                    f"{_ADVICE[inputs]}"
                )

    return agree


def _hand_in(groups: MeshGroups, words: list[int]) -> Callable[[], list[list[int]]]:
    """Tell all ranks some numbers; return what waits for theirs: for each number those of all ranks."""
    if groups.board is not None:
        turn, board = groups.board.post(words), groups.board
        return lambda: [list(column) for column in zip(*(row[: len(words)] for row in board.read(turn)))]
    table = torch.empty(len(groups.ranks) * len(words), dtype=torch.int64)
    work = dist.all_gather_single(table, torch.tensor(words), group=groups.control, async_op=True)

    def take() -> list[list[int]]:
        work.wait()
        return table.reshape(-1, len(words)).T.tolist()  # type: ignore[no-any-return]

    return take


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _first_of_share(mesh: Mesh, rank: int) -> int:
    """Return the first rank that passes the same share as ``rank``: that at its place of the first axis."""
    share = next((axis for axis in range(mesh.num_axes) if axis != mesh.pipeline_axis), None)
    return mesh.rank([at if axis == share else 0 for axis, at in enumerate(mesh.coordinate(rank))])
