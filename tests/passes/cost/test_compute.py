"""Seconds of ops: views, memory traffic, products recognised by their rule."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from autopar.passes import ops as _ops  # noqa: F401
from autopar.passes.cost.compute import local_seconds, numbers_drawn, op_seconds, product_of
from autopar.passes.cost.devices import device
from autopar.passes.rules import families
from autopar.passes.rules.check import node_of
from autopar.passes.rules.rule import Factor, Rule
from autopar.passes.rules.table import rule_of

families.load()
aten = torch.ops.aten
A100 = device("a100")


def rule(operands, results, flops=1.0):
    """Return a rule of letters."""
    letters = sorted({letter for dims in (*operands, *results) for letter in dims})
    split = tuple(tuple(dims) for dims in operands), tuple(tuple(dims) for dims in results)
    return Rule(tuple(Factor(letter, 4) for letter in letters), *split, flops=flops)


def lengths(**sizes):
    """Return one strategy's lengths."""
    return {name: np.array([size]) for name, size in sizes.items()}


@pytest.mark.parametrize(
    ("operands", "result", "expected"),
    [
        (("abk", "nk"), "abn", (1, 6, 7, 5)),
        (("bmk", "bkn"), "bmn", (3, 4, 7, 5)),
        (("abn", "abk"), "nk", (1, 7, 5, 6)),
        (("bk", "nk", "n"), "bn", (1, 3, 7, 5)),
    ],
)
def test_products_by_their_letters(operands, result, expected):
    """Letters fall into batch, m, n and k."""
    made = product_of(rule(operands, [result]), lengths(a=2, b=3, m=4, k=5, n=7))
    assert tuple(float(x[0]) for x in (made.batch, made.m, made.n, made.k)) == expected


def test_rows_of_operands_in_memory():
    """The last dim of each operand is what lies together: of a weight's gradient both features, never the tokens."""
    forward = product_of(rule(("abk", "nk"), ["abn"]), lengths(a=1, b=3, k=5, n=7))
    assert [float(x[0]) for x in forward.rows] == [5, 5]
    gradient = product_of(rule(("abn", "abk"), ["nk"]), lengths(a=1, b=3, k=5, n=7))
    assert [float(x[0]) for x in gradient.rows] == [7, 5]


def test_other_ops_are_no_products():
    """Neither a sum of two tensors nor an op with many results is a product."""
    assert product_of(rule(("ab", "ab"), ["ab"], flops=0.0), lengths(a=1, b=1)) is None
    assert product_of(rule(("ab", "ab"), ["ab"]), lengths(a=1, b=1)) is None
    assert product_of(rule(("ab", "ab"), ["a", "b"]), lengths(a=1, b=1)) is None


def test_a_convolution_is_no_product_of_its_factors():
    """Pixels and kernel are dims that no factor names: left out, a convolution would cost a thousandth."""
    image, weight = torch.empty(2, 8, 32, 32), torch.empty(4, 8, 3, 3)
    convolution = rule_of(
        node_of(aten.convolution.default, (image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1))
    )
    sizes = {factor.name: float(factor.size) for factor in convolution.factors}
    assert product_of(convolution, lengths(**sizes)) is None
    flops = 2.0 * 2 * 32 * 32 * 4 * 8 * 3 * 3
    seconds = local_seconds(aten.convolution.default, convolution, sizes, 0.0, "float32", A100)
    assert seconds == pytest.approx(flops / A100.flops_per_s("float32") + A100.launch_s)


def test_views_are_free():
    """A view costs nothing, whatever it shows."""
    assert op_seconds(aten.view.default, 0.0, 1e9, "float32", A100) == 0


def test_memory_bound_ops_cost_their_bytes():
    """Bytes over the bandwidth that streams reach, and one launch; none inside another kernel."""
    seconds = op_seconds(aten.add.Tensor, 0.0, 1e9, "float32", A100)
    assert seconds == pytest.approx(1e9 / A100.stream_bytes_per_s + A100.launch_s)
    assert op_seconds(aten.add.Tensor, 0.0, 0.0, "float32", A100, launches=0.0) == 0


def test_attention_reaches_less_than_products():
    """Fused attention does fewer flops a second than a product."""
    op = torch.ops.autopar.attention.default
    assert op_seconds(op, 1e12, 0.0, "bfloat16", A100) > 1e12 / A100.flops_per_s("bfloat16")


def test_dtypes():
    """Wider numbers take longer."""
    op = aten.convolution.default
    assert op_seconds(op, 1e12, 0.0, "float32", A100) > op_seconds(op, 1e12, 0.0, "bfloat16", A100)


def test_what_calls_and_kernels_cost_on_a_cpu():
    """A view costs its call, random numbers each their time, and attention or convolution the share of its own kind."""
    plain = device("cpu")
    slow = replace(plain, view_s=2e-6, draw_s=1e-9, shares={"convolution": 0.25, "attention": 0.31})
    assert op_seconds(aten.view.default, 0.0, 1e6, "float32", slow) == 2e-6
    drawn = op_seconds(torch.ops.autopar.bernoulli.default, 0.0, 8.0, "float32", slow, drawn=1e6)
    assert drawn - op_seconds(torch.ops.autopar.bernoulli.default, 0.0, 8.0, "float32", slow) == pytest.approx(1e-3)
    for target, times in ((aten.convolution.default, 4.0), (torch.ops.autopar.attention.default, 2.0)):
        seconds = [op_seconds(target, 1e12, 8.0, "float32", each) for each in (slow, plain)]
        assert seconds[0] / seconds[1] == pytest.approx(times, rel=1e-3)


def test_ops_bound_by_memory_have_rates_and_calls_of_their_own():
    """An op whose functions take longer than its bytes, by as much; one of several kernels, by its own call."""
    plain = device("cpu")
    slow = replace(plain, shares={"aten.gelu": 0.25}, calls={"aten.gelu": 5e-6})
    for target, share, call_s in ((aten.gelu.default, 0.25, 5e-6), (aten.add.Tensor, 1.0, plain.launch_s)):
        for num_bytes in (0.0, 1e6):
            stream_s = op_seconds(target, 0.0, num_bytes, "float32", plain) - plain.launch_s
            assert op_seconds(target, 0.0, num_bytes, "float32", slow) == pytest.approx(stream_s / share + call_s)
    assert op_seconds(aten.gelu.default, 0.0, 0.0, "float32", slow, launches=0.0) == 0


def test_numbers_drawn_are_those_of_the_whole_tensor():
    """A rank draws the numbers of the global tensor, of which it keeps a piece."""
    whole = torch.empty(6, 7, device="meta")
    letters = rule((), ("ab",))
    assert numbers_drawn(letters, [whole]) == 0.0
    assert numbers_drawn(replace(letters, random=True), [whole]) == 42.0
