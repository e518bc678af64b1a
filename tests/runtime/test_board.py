"""Tests of numbers that ranks of one host tell each other through shared memory."""

import mmap
import os
import threading
from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from autopar.errors import InputError
from autopar.passes.collective_calls import WAIT
from autopar.runtime.board import TURNS, WORDS, Board, _started
from autopar.runtime.sum_on_boards import sum_on_boards

WORD = st.integers(-(2**63), 2**63 - 1)


def _boards(num_ranks: int, processes: list[tuple[int, str]] | None = None, patience_s: float = 60.0) -> list[Board]:
    memory = mmap.mmap(-1, Board.size(num_ranks))
    me = (os.getpid(), _started(os.getpid()))
    patience = timedelta(seconds=patience_s)
    return [Board(memory, rank, processes or [me] * num_ranks, patience) for rank in range(num_ranks)]


@given(st.lists(st.lists(st.lists(WORD, max_size=WORDS), min_size=3, max_size=3), max_size=20))
def test_every_rank_reads_what_all_posted(turns: list[list[list[int]]]) -> None:
    boards = _boards(3)
    for rows in turns:
        numbers = {board.post(row) for board, row in zip(boards, rows)}
        (turn,) = numbers
        for board in boards:
            assert [found[: len(row)] for found, row in zip(board.read(turn), rows)] == rows


def test_ranks_run_at_their_own_pace() -> None:
    """One posts ahead as far as there is room, the other comes late: nothing is overwritten, nothing is lost."""
    boards, rounds = _boards(2), 50 * TURNS
    seen: list[list[list[int]]] = []

    def late() -> None:
        for number in range(rounds):
            seen.append(boards[1].read(boards[1].post([-number])))

    thread = threading.Thread(target=late)
    thread.start()
    ahead = [boards[0].post([number]) for number in range(TURNS - 1)]
    for number in range(TURNS - 1, rounds):
        ahead.append(boards[0].post([number]))
        boards[0].read(ahead.pop(0))
    for turn in ahead:
        boards[0].read(turn)
    thread.join()
    assert [[row[0] for row in rows] for rows in seen] == [[number, -number] for number in range(rounds)]


def test_half_a_post_is_not_read() -> None:
    """A reader that sees the turn before the numbers, as processors may order writes, looks again."""
    one, other = _boards(2, patience_s=0.0)
    turn = one.post([1, 2])
    other.post([3, 4])
    at = one._slot(1, turn)
    one._words[at + 1] = 5
    assert one._look(1, turn) == []
    one._words[at + 1] = 3
    assert one._look(1, turn) == [3, 4] + [0] * (WORDS - 2)


def test_a_rank_that_ended_is_named() -> None:
    process = os.posix_spawn("/bin/true", ["true"], {})
    started = _started(process)
    os.waitpid(process, 0)
    board = _boards(2, [(os.getpid(), _started(os.getpid())), (process, started or "0")])[0]
    with pytest.raises(InputError, match="rank 1 of 2 ended"):
        board.read(board.post([0]))


def test_a_rank_that_posted_and_ended_is_read() -> None:
    """It is looked for once more after it was found to have ended."""
    gone, here = _boards(2)
    turn = here.post([0])

    answers = [[0], []]

    def missing() -> list[int]:
        gone.post([7])
        return answers.pop(0)

    here._processes = [(0, "never"), here._processes[1]]
    here._require_alive(missing, 1.0)
    assert [row[0] for row in here.read(turn)] == [7, 0]


def test_a_rank_that_does_not_come_is_named() -> None:
    board = _boards(2, patience_s=0.5)[0]
    with pytest.raises(InputError, match="rank 1 of 2 did not come within"):
        board.read(board.post([0]))


VALUES = {
    torch.float32: st.floats(width=32),
    torch.bfloat16: st.floats(width=16),
    torch.float64: st.floats(),
    torch.int64: WORD,
    torch.int32: st.integers(-(2**31), 2**31 - 1),
}


@given(st.data(), st.sampled_from(sorted(VALUES, key=str)), st.sampled_from([(), (1,), (2, 3)]))
def test_sums_are_those_of_the_parts(data: st.DataObject, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Equal on every rank; what is summed in 64 bits and rounded once, or wraps as integers do."""
    number = torch.Size(shape).numel()
    parts = [
        torch.tensor(data.draw(st.lists(VALUES[dtype], min_size=number, max_size=number)), dtype=dtype).reshape(shape)
        for _ in range(2)
    ]
    boards = _boards(2)
    graphs = [_summed(parts[0]) for _ in boards]
    for graph, board in zip(graphs, boards):
        sum_on_boards(graph, [board])
        assert not [node for node in graph.nodes if node.target is WAIT]
    nodes = [list(graph.nodes) for graph in graphs]
    turns = [node[1].target(part) for node, part in zip(nodes, parts)]
    totals = [node[2].target(turn) for node, turn in zip(nodes, turns)]
    wide = torch.int64 if dtype in (torch.int64, torch.int32) else torch.float64
    for total in totals:
        torch.testing.assert_close(
            total, (parts[0].to(wide) + parts[1].to(wide)).to(dtype), rtol=0, atol=0, equal_nan=True
        )
        assert total.dtype == dtype and total.shape == shape


def test_larger_sums_go_by_the_library() -> None:
    graph = _summed(torch.ones(WORDS + 1))
    before = [node.target for node in graph.nodes]
    sum_on_boards(graph, [_boards(2)[0]])
    assert [node.target for node in graph.nodes] == before


def _summed(part: torch.Tensor) -> fx.Graph:
    graph = fx.Graph()
    operand = graph.placeholder("part")
    total = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (operand, "sum", "axis:0"))
    wait = graph.call_function(WAIT, (total,))
    graph.output((wait,))
    for node in (operand, total, wait):
        node.meta.update(val=part, origin="part", reason="")
    return graph
