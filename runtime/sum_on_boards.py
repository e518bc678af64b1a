"""Sums a few numbers over ranks of one host by what these have posted on a board, instead of a call of gloo.

Counts of labels and losses are such numbers; each is one collective of the plan all the same. Every rank adds in the
order of ranks, floating point in 64 bits, so all have the same sum. One on several axes goes over the board of each in
turn: that costs less than one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import pack, unpack

import torch
from torch import Tensor, fx

from autopar.passes.collective_calls import WAIT, Call, collective_calls
from autopar.runtime.board import WORDS, Board

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32)


class SmallSum:
    """A sum of a few numbers over the ranks of one axis.

    Args:
        board: of these ranks.
        axis: of the mesh.
        value: a tensor of the sum's shape and dtype.
    """

    def __init__(self, board: Board, axis: int, value: Tensor) -> None:
        self.axis = axis
        self._board, self._shape, self._dtype = board, value.shape, value.dtype
        self._wide, code = (torch.float64, "d") if value.dtype in _FLOATS else (torch.int64, "q")
        self._numbers, self._words = f"{value.numel()}{code}", f"{value.numel()}q"

    def post(self, part: Tensor) -> int:
        """Post this rank's part; return the turn."""
        return self._board.post(unpack(self._words, pack(self._numbers, *part.reshape(-1).tolist())))

    def total(self, turn: int, ranks: Sequence[int] | None = None) -> Tensor:
        """Return the sum of all parts, or of those of some ranks; waits for them."""
        count = self._shape.numel()
        rows = [unpack(self._numbers, pack(self._words, *row[:count])) for row in self._board.read(turn, ranks)]
        totals = [sum(column) for column in zip(*rows)]
        if self._wide is torch.int64:  # wrap as tensors do
            totals = [(total + 2**63) % 2**64 - 2**63 for total in totals]
        return torch.tensor(totals, dtype=self._wide).to(self._dtype).reshape(self._shape)

    def calls(self) -> tuple[Callable[[Tensor], int], Callable[[int], Tensor]]:
        """Return both as functions for a graph."""

        def post_part(part: Tensor) -> int:
            return self.post(part)

        def sum_parts(turn: int) -> Tensor:
            return self.total(turn)

        return post_part, sum_parts


def sum_on_boards(graph: fx.Graph, boards: Sequence[Board | None]) -> None:
    """Change a lowered graph in place.

    Args:
        graph: its groups are not bound yet.
        boards: of each axis, None where its ranks share none.
    """
    for node in list(graph.nodes):
        call = _small_sum(node)
        found = [] if call is None else [(axis, board) for axis in call.axes if (board := boards[axis]) is not None]
        if call is None or len(found) < len(call.axes):
            continue
        (wait,) = node.users
        (post, take), *others = [SmallSum(board, axis, call.value).calls() for axis, board in found]
        with graph.inserting_before(node):
            turn = graph.call_function(post, (call.operand,))
        with graph.inserting_before(wait):
            total = graph.call_function(take, (turn,))
            for post, take in others:
                total = graph.call_function(take, (graph.call_function(post, (total,)),))
        total.meta = dict(wait.meta)
        wait.replace_all_uses_with(total)
        graph.erase_node(wait)
        graph.erase_node(node)


def _small_sum(node: fx.Node) -> Call | None:
    """Return the sum of a few numbers that one wait reads; None of anything else."""
    calls = collective_calls(node)
    if len(calls) != 1 or [user.target for user in node.users] != [WAIT]:
        return None
    (call,) = calls
    return call if call.kind == "all_reduce" and call.arguments[0] == "sum" and fits(call.value) else None


def fits(value: Tensor) -> bool:
    """Tell whether a tensor can go over a board."""
    return 0 < value.numel() <= WORDS and value.dtype in (*_FLOATS, *_INTEGERS)
