"""What single ops do to memory, learnt on meta tensors."""

from __future__ import annotations

from typing import Any

import torch

from autopar.passes.cost.op_memory import Form, OpMemories

ATEN: Any = torch.ops.aten


def form(*shape: int, storage: int = 0, stride: tuple[int, ...] | None = None) -> Form:
    """Return a float32 form, contiguous by default."""
    return Form(shape, stride or torch.empty(shape, device="meta").stride(), torch.float32, storage)


def test_a_view_shares_its_operand() -> None:
    """The result's storage is the operand's; nothing is allocated."""
    found = OpMemories({}).of(ATEN.t.default, (form(2, 3),), {}, None)
    (result,) = found.results
    assert result is not None
    assert (result.shape, result.stride, result.source, result.fresh) == ((3, 2), (1, 3), 0, -1)
    assert found.single and found.workspace_bytes == 0


def test_a_reshape_copies_what_it_must() -> None:
    """The same op is a view of a contiguous operand and a copy of a transposed one."""
    memories = OpMemories({})
    there, back = (
        memories.of(ATEN.reshape.default, (form(2, 3, stride=stride), [6]), {}, None).results[0]
        for stride in ((3, 1), (1, 2))
    )
    assert there is not None and back is not None
    assert (there.source, back.source, back.nbytes) == (0, -1, 24)


def test_copies_inside_an_op_are_workspace() -> None:
    """A product over two dims of a transposed operand copies it while it runs."""
    args = ("abk,kbn->an", [form(4, 5, 6), form(6, 5, 7, storage=1)])
    found = OpMemories({}).of(ATEN.einsum.default, args, {}, None)
    assert found.workspace_bytes == 6 * 5 * 7 * 4
    assert found.results[0] is not None and found.results[0].nbytes == 4 * 7 * 4


def test_several_results() -> None:
    """Results of a tuple lie in storages of their own; one that is no tensor is None."""
    args = (form(4, 3), [3], form(3, storage=1), form(3, storage=2), 1e-5)
    found = OpMemories({}).of(ATEN.native_layer_norm.default, args, {}, None)
    assert not found.single
    assert [result.fresh for result in found.results if result is not None] == [0, 1, 2]


def test_an_op_that_does_not_run_on_meta_is_taken_by_its_values() -> None:
    """The results are then new and contiguous, as their meta tensors say."""

    def refuses(x: torch.Tensor) -> Any:
        return x.numpy()

    found = OpMemories({}).of(refuses, (form(4),), {}, torch.empty(7, device="meta"))
    (result,) = found.results
    assert result is not None and (result.nbytes, result.source, found.workspace_bytes) == (28, -1, 0)


def test_numbers_are_told_apart_by_type() -> None:
    """True, 1 and 1.0 are different arguments."""
    memories = OpMemories({})
    dtypes = [
        result.dtype
        for fill in (True, 1, 1.0)
        if (result := memories.of(torch.full, ((2,), fill), {"device": torch.device("cpu")}, None).results[0])
    ]
    assert dtypes == [torch.bool, torch.int64, torch.float32]
