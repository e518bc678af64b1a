"""Every spelling of a product becomes ``autopar::contract`` with all its dims in sight, and equals eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.passes.capture import capture
from autopar.passes.program import Program, check_program
from tests.captured import assert_same_step, run_eager, run_program
from tests.passes.test_trace_loss import compare, draw

PRODUCTS = {"aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", "aten.mv", "aten.dot", "aten.addmv", "aten.einsum"}


def equations(program: Program) -> list[str]:
    """Return the equations of a program's forward products; no product is left in another form."""
    assert not PRODUCTS & {str(node.target).rsplit(".", 1)[0] for node in program.ops()}
    products = [node for node in program.ops() if str(node.target) == "autopar.contract.default"]
    return [str(node.args[2]) for node in products if node.meta["phase"] == "forward"]


@pytest.mark.parametrize(
    ("left", "right", "equation"),
    [
        ((3, 4), (4, 5), "ab,bc->ac"),
        ((2, 3, 4), (4, 5), "abc,cd->abd"),
        ((2, 3, 4), (2, 4, 5), "abc,acd->abd"),
        ((2, 1, 3, 4), (2, 6, 4, 5), "acd,abde->abce"),
        ((1, 2, 3, 4), (2, 4, 5), "abcd,bde->abce"),
        ((3, 4), (2, 4, 5), "bc,acd->abd"),
        ((4,), (2, 4, 5), "b,abc->ac"),
        ((2, 3, 4), (4,), "abc,c->ab"),
        ((4,), (4,), "a,a->"),
        ((1, 3, 4), (1, 4, 5), "abc,acd->abd"),
    ],
)
def test_matmul(left: tuple[int, ...], right: tuple[int, ...], equation: str) -> None:
    """Matrices, vectors, batches and broadcast batches; dims of size 1 that broadcast are squeezed away."""
    found = equations(compare(lambda x, y: x @ y, draw(*left), draw(*right)))
    assert len(found) == 1
    a, _, rest = found[0].partition(",")
    b, _, out = rest.partition("->")
    names = {letter: str(i) for i, letter in enumerate(dict.fromkeys(a + b + out))}
    wanted = {letter: str(i) for i, letter in enumerate(dict.fromkeys(x for x in equation if x.isalpha()))}
    assert found[0].translate(str.maketrans(names)) == equation.translate(str.maketrans(wanted))


def test_spellings() -> None:
    """Functions, methods, operators and modules of products, with and without a sum."""
    vector, matrix, batch = draw(4), draw(4, 4) + 0.1, draw(3, 4, 4) - 0.2

    def run(x: Tensor) -> Tensor:
        y = torch.matmul(x, matrix) + x.matmul(matrix) + torch.bmm(x, batch) + x.bmm(batch) + batch.__rmatmul__(x)
        y = (
            y
            + torch.baddbmm(batch, x, batch, beta=0.5, alpha=2.0)
            + batch.baddbmm(x, batch)
            + F.linear(x, matrix, vector)
        )
        z = (
            torch.mm(x[0], matrix)
            + x[0].mm(matrix)
            + torch.addmm(vector, x[0], matrix, beta=2)
            + matrix.addmm(x[0], matrix)
        )
        w = torch.mv(x[0], vector) + x[0].mv(vector) + torch.addmv(vector, x[0], vector) + torch.dot(vector, x[0, 0])
        return (
            y + z + w + vector.dot(x[0, 1]) + torch.linalg.matmul(x, matrix) + torch.addmm(vector, x[0], matrix, beta=0)
        )

    assert len(equations(compare(run, batch + 0.3))) == 7  # equal ones are computed once


def test_operands_by_name() -> None:
    """The operands' own names may be used, and a result may be asked for in another tensor."""
    vector, matrix = draw(4), draw(4, 4)

    def run(x: Tensor) -> Tensor:
        y = torch.mm(x, mat2=matrix) + x.matmul(other=matrix) + torch.addmm(vector, mat1=x, mat2=matrix, beta=2)
        z = torch.mv(x, vec=vector) + torch.addmv(vector, mat=x, vec=vector) + torch.dot(vector, tensor=vector)
        y = y + torch.baddbmm(x[None], batch1=x[None], batch2=matrix[None])[0]
        return y + z + torch.bmm(x[None], mat2=matrix[None])[0]

    assert len(equations(compare(run, matrix + 0.3))) == 4


@pytest.mark.parametrize(
    ("equation", "left", "right"),
    [
        ("bqhd,bkhd->bhqk", (2, 3, 4, 5), (2, 6, 4, 5)),
        ("BQ,QK->BK", (2, 3), (3, 4)),
        ("ij,jk", (2, 3), (3, 4)),
        ("bi,bj->bij", (2, 3), (2, 4)),
        ("abc,cd->ad", (2, 3, 4), (4, 5)),
        ("ab,cd->ac", (2, 3), (4, 5)),
        ("bij,bjk->bik", (1, 3, 4), (2, 4, 5)),
        ("bij,bjk->ki", (1, 3, 4), (2, 4, 5)),
        ("i,i->", (3,), (3,)),
        ("zyx, xw -> w y z", (2, 3, 4), (4, 5)),
    ],
)
def test_einsum(equation: str, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    """Letters, sums of one operand, broadcast dims, implicit results, spaces."""
    found = equations(compare(lambda x, y: torch.einsum(equation, x, y), draw(*left), draw(*right)))
    assert len(found) == 1


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [("...ij,...jk->...ik", ((2, 3, 4), (2, 4, 5))), ("ii->i", ((3, 3),)), ("ij,jk,kl->il", ((2, 3), (3, 4), (4, 5)))],
)
def test_other_einsums(equation: str, shapes: Any) -> None:
    """Ellipses, diagonals and more operands go the usual way and still end in contractions or no product."""
    equations(compare(lambda *xs: torch.einsum(equation, *xs), *(draw(*shape) for shape in shapes)))


def test_merged_rows() -> None:
    """Rows merged before a product and split after it leave no view, also through casts, sums and a second product."""
    weight, bias = draw(4, 4), draw(4)

    def run(x: Tensor) -> Tensor:
        y = torch.addmm(bias, x.view(-1, 4), weight).view(2, 3, 4)
        y = F.linear(F.linear(y.flatten(0, 1), weight, bias).double(), weight).reshape(2, 3, 4)
        return (y.reshape(-1, y.size(-1)) @ weight).unflatten(0, (2, 3))

    program = compare(run, draw(2, 3, 4))
    assert len(equations(program)) == 4
    views = [n for n in program.ops() if "view" in str(n.target) and n.meta["phase"] == "forward"]
    assert len(views) <= 1


@pytest.mark.parametrize("weights", [True, False])
def test_rows_and_heads_merged_at_once(weights: bool) -> None:
    """Attention of torch merges rows, and heads with their width, in one view: the product sees the batch."""
    torch.manual_seed(0)
    model, x = torch.nn.MultiheadAttention(4, 2, batch_first=True), draw(2, 3, 4, dtype=torch.float32)
    program = check_program(capture(model, (x, x, x), {"need_weights": weights}))
    assert_same_step(
        run_program(program, model, (x, x, x), {"need_weights": weights}),
        run_eager(program, model, (x, x, x), {"need_weights": weights}),
    )
    assert set(equations(program)) <= {"abc,dc->abd", "abc,acd->abd"}


def test_products_below_torch_functions() -> None:
    """Products that only ATen sees, as inside a recurrent layer, become contractions too."""
    torch.manual_seed(0)
    model, args = torch.nn.LSTM(4, 6, batch_first=True), (draw(2, 3, 4, dtype=torch.float32),)
    program = check_program(capture(model, args))
    assert_same_step(run_program(program, model, args, {}), run_eager(program, model, args, {}))
    assert all(role.node for role in program.outputs)
    assert not PRODUCTS & {str(node.target).rsplit(".", 1)[0] for node in program.ops()}
