"""Rules of ops that have none: found by trying, never by believing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.passes.rules.check import check_rule, node_of
from autopar.passes.rules.discover import discover
from autopar.passes.rules.rule import Rule
from autopar.passes.rules.table import rule_of
from tests.verified import verified_function

LIBRARY = torch.library.Library("autopar_test_discover", "DEF")


def _define(schema: str, function: Callable[..., Any], **options: Any) -> Any:
    name = schema.split("(")[0]
    LIBRARY.define(schema, **options)
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autopar_test_discover::{name}", function, lib=LIBRARY)
    return getattr(torch.ops.autopar_test_discover, name).default


def _kernel_of_no_device(x: Tensor) -> Tensor:
    if type(x) is Tensor:
        raise KeyError("no kernel")
    return torch.empty_like(x)


SWIGLU = _define("swiglu(Tensor a, Tensor b) -> Tensor", lambda a, b: torch.nn.functional.silu(a) * b)
RMS = _define(
    "rms(Tensor x, Tensor w) -> (Tensor, Tensor)",
    lambda x, w: (x * torch.rsqrt((x * x).mean(-1, True) + 1e-6) * w, torch.rsqrt((x * x).mean(-1) + 1e-6)),
)
WEIGHT_GRAD = _define("weight_grad(Tensor g, Tensor x) -> Tensor", lambda g, x: torch.einsum("bsn,bsk->nk", g, x))
MATMUL = _define("matmul(Tensor x, Tensor w) -> Tensor", lambda x, w: x @ w)
HEADS = _define(
    "heads(Tensor x, int h) -> Tensor", lambda x, h: x.reshape(x.shape[0], h, -1).softmax(-1).reshape(x.shape)
)
NOISE = _define("noise(Tensor x) -> Tensor", torch.rand_like)
TAGGED = _define("tagged(Tensor x) -> Tensor", torch.rand_like, tags=(torch.Tag.nondeterministic_seeded,))
MUTATES = _define("mutates(Tensor(a!) x) -> Tensor", lambda x: x.add_(1).clone())
RAISES = _define("raises(Tensor x) -> Tensor", _kernel_of_no_device)
GROUPED = _define(
    "grouped(Tensor x, Tensor w, Tensor ends) -> Tensor",
    lambda x, w, ends: torch.where(torch.arange(len(x))[:, None] < ends[-1], x @ w[0], x @ w[-1]),
)
CRASHES = _define(
    "crashes(Tensor x) -> Tensor",
    lambda x: torch.empty_like(x) if type(x) is not Tensor else os.kill(os.getpid(), signal.SIGSEGV),
)
ZERO = _define("zero(Tensor x) -> Tensor", lambda x: x.new_zeros(x.shape[1]))


def _rule(target: Any, *args: Any) -> Rule:
    return discover(node_of(target, args))


def test_a_gated_unit_is_parallel_in_every_dim_and_linear_in_its_gate() -> None:
    """Elementwise structure and linearity are both found."""
    rule = _rule(SWIGLU, torch.randn(4, 8, 32), torch.randn(4, 8, 32))
    assert [factor.kind for factor in rule.factors] == ["parallel"] * 3
    assert rule.linear == ((1,),)


def test_a_norm_is_parallel_in_its_leading_dims_only() -> None:
    """The normalised dim stays whole, with two results."""
    rule = _rule(RMS, torch.randn(4, 8, 32), torch.randn(32))
    assert len(rule.factors) == 2
    assert rule.operands[0][2] is None
    assert rule.results[1] == rule.results[0][:2]


def test_a_weight_gradient_is_a_sum_over_batch_and_sequence() -> None:
    """Reductions are found beside parallel factors."""
    rule = _rule(WEIGHT_GRAD, torch.randn(4, 8, 32), torch.randn(4, 8, 16))
    assert sorted(factor.kind for factor in rule.factors) == ["parallel", "parallel", "sum", "sum"]
    assert rule.linear == ((0,), (1,))


def test_equal_sizes_are_told_apart() -> None:
    """A square product has three factors, though all sizes are one number."""
    args = (torch.randn(8, 8), torch.randn(8, 8))
    rule = _rule(MATMUL, *args)
    assert len(rule.factors) == 3
    assert check_rule(MATMUL, args, {}, rule, parts=(2, 2)) == []


def test_what_an_argument_ties_together_is_not_split() -> None:
    """A dim that an int argument divides into heads of its own softmax stays whole."""
    rule = _rule(HEADS, torch.randn(6, 32), 4)
    assert rule.operands[0][0] is not None
    assert rule.operands[0][1] is None


def test_random_ops_are_replicated_and_marked() -> None:
    """With the tag or without it."""
    for target in (NOISE, TAGGED):
        rule = _rule(target, torch.randn(4, 4))
        assert rule.random
        assert rule.reason
        assert len(rule.choices()) == 1


def test_ops_that_write_to_their_arguments_are_replicated() -> None:
    """The reason says so."""
    assert "writes to its arguments" in _rule(MUTATES, torch.randn(4)).reason


def test_ops_that_can_not_run_here_are_replicated() -> None:
    """Whatever they raise, the reason carries it and nothing else happens."""
    rule = _rule(RAISES, torch.randn(4))
    assert "KeyError" in rule.reason
    assert len(rule.choices()) == 1


def test_ops_that_crash_on_invented_inputs_are_replicated() -> None:
    """A kernel that trusts its arguments takes nothing down but the process that tries it."""
    rule = _rule(CRASHES, torch.randn(4))
    assert "its process died" in rule.reason
    assert len(rule.choices()) == 1


def test_zeros_prove_no_sum() -> None:
    """An op whose result is zero for all that was tried is not taken for a partial sum or for linear."""
    rule = _rule(ZERO, torch.randn(4, 8))
    assert rule.linear == ()
    assert all(factor.kind == "parallel" for factor in rule.factors)


def test_rows_that_offsets_point_into_are_not_split() -> None:
    """Integers are tried as offsets too: with 0 and 1 alone the rows would look independent of their place."""
    rule = _rule(GROUPED, torch.randn(16, 4), torch.randn(3, 4, 12), torch.tensor([4, 9, 16]))
    assert rule.operands[0][0] is None
    assert [factor.kind for factor in rule.factors if factor.size == 12] == ["parallel"]


def test_writes_at_indices_are_tried_with_pieces_that_go_to_places_of_their_own() -> None:
    """A maximum that leaves out what was there differs where a piece of the rows writes nothing."""
    operands = (torch.randn(5, 7), 0, torch.randint(0, 5, (9, 7)), torch.randn(9, 7), "amax")
    rules = [discover(node_of(aten.scatter_reduce.two, operands, {"include_self": own})) for own in (False, True)]
    assert [[factor.kind for factor in rule.factors] for rule in rules] == [["parallel"], ["parallel", "max"]]


def test_a_python_function_is_replicated() -> None:
    """A call that is no library op says so."""
    node = node_of(aten.neg.default, (torch.randn(3),))
    node.target = torch.nn.functional.relu
    assert "no library op" in discover(node).reason


def test_the_table_falls_back_to_discovery_and_keeps_the_generator() -> None:
    """Planning draws random inputs of its own: the user's random numbers stay as they were."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    rule = rule_of(node_of(MATMUL, (torch.randn(4, 6), torch.randn(6, 10))))
    torch.manual_seed(3)
    assert torch.equal(before, torch.get_rng_state())
    state = torch.get_rng_state()
    discover(node_of(MATMUL, (torch.ones(4, 6), torch.ones(6, 12))))
    assert torch.equal(state, torch.get_rng_state())
    assert len(rule.factors) == 3


aten = torch.ops.aten


def _scaled_tanh(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x) * w


def _scaled_tanh_backward(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    t = torch.tanh(x)
    return g * w * (1 - t * t), (g * t).sum(0)


_define("scaled_tanh(Tensor x, Tensor w) -> Tensor", _scaled_tanh)
_define("scaled_tanh_backward(Tensor g, Tensor x, Tensor w) -> (Tensor, Tensor)", _scaled_tanh_backward)
torch.library.register_autograd(
    "autopar_test_discover::scaled_tanh",
    lambda ctx, g: torch.ops.autopar_test_discover.scaled_tanh_backward(g, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    lib=LIBRARY,
)


def test_somebodys_op_with_a_gradient_of_its_own() -> None:
    """A custom op and its backward are split by what is found, in a model that is planned and compared whole."""
    program = verified_function(lambda x: torch.ops.autopar_test_discover.scaled_tanh(x, x[0]).square())
    found = {str(node.target): node.meta["rule"] for node in program.ops() if "scaled_tanh" in str(node.target)}
    assert len(found) == 2
    for rule in found.values():
        assert len(rule.factors) == 2 and not rule.reason
    backward = next(rule for name, rule in found.items() if "backward" in name)
    assert {factor.kind for factor in backward.factors} == {"sum", "parallel"}
