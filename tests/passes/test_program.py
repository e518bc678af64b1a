"""``check_program`` finds every broken invariant; fingerprints tell programs apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from autopar.errors import AutoparError
from autopar.passes.capture import capture
from autopar.passes.program import Program, check_program
from tests.models import mlp


def fresh() -> Program:
    """Capture the MLP."""
    model, args, kwargs = mlp()
    return capture(model, args, kwargs)


def op(program: Program, name: str) -> torch.fx.Node:
    """Return a node by name."""
    return program.nodes()[name]


def drop_val(program: Program) -> None:
    del op(program, "gelu").meta["val"]


def drop_source(program: Program) -> None:
    del op(program, "gelu").meta["source"]


def wrong_phase(program: Program) -> None:
    op(program, "gelu").meta["phase"] = "sideways"


def forward_needs_backward(program: Program) -> None:
    op(program, "gelu_backward").meta["phase"] = "forward"
    op(program, "gelu_backward").users[next(iter(op(program, "gelu_backward").users))] = None


def lost_forward_node(program: Program) -> None:
    op(program, "gelu_backward").meta["forward_node"] = "nobody"


def fewer_inputs(program: Program) -> None:
    program.inputs = program.inputs[:-1]


def other_outputs(program: Program) -> None:
    program.outputs = (replace(program.outputs[0], node="gelu"), *program.outputs[1:])


def lost_owner(program: Program) -> None:
    program.outputs = (*program.outputs[:-1], replace(program.outputs[-1], of="nobody"))


def write(program: Program) -> None:
    op(program, "gelu").target = torch.ops.aten.relu_.default


def read_a_tuple(program: Program) -> None:
    op(program, "contract_2").args = (op(program, "native_layer_norm"), *op(program, "contract_2").args[1:])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (drop_val, "gelu has no val"),
        (drop_source, "gelu lacks its module or source"),
        (wrong_phase, "gelu is in the phase 'sideways'"),
        (forward_needs_backward, "gelu_backward is in the forward, but needs the backward"),
        (lost_forward_node, "belongs to nobody, which does not exist"),
        (fewer_inputs, "do not match the inputs"),
        (other_outputs, "the outputs are"),
        (lost_owner, "belongs to 'nobody', which is no placeholder"),
        (write, "gelu writes into its operand"),
        (read_a_tuple, "native_layer_norm has several results"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_check_program(fault: Callable[[Program], None], message: str) -> None:
    """Each fault is named with its node; the program as captured has none."""
    program = fresh()
    assert check_program(program) is program
    fault(program)
    with pytest.raises(AutoparError, match=message):
        check_program(program)


def test_fingerprint_of_objects() -> None:
    """An output that is an object does not bring its address in."""

    class Thing:
        pass

    class Make(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Thing]:
            return x.sum(), Thing()

    one, two = (capture(Make(), (torch.ones(2),)) for _ in range(2))
    assert one.outputs[1].constant is not two.outputs[1].constant
    assert one.fingerprint() == two.fingerprint()


def test_fingerprint() -> None:
    """Equal programs have equal fingerprints; another shape, dtype, number or frozen parameter changes it."""
    model, (x, y), _ = mlp()
    same = fresh().fingerprint()
    assert same == fresh().fingerprint()
    others = [
        capture(model, (x[:4], y[:4])),
        capture(mlp(dropout=0.1)[0], (x, y)),
        capture(model.double(), (x.double(), y)),
    ]
    model.float().head.bias.requires_grad_(False)
    others.append(capture(model, (x, y)))
    assert len({same, *(program.fingerprint() for program in others)}) == 5
