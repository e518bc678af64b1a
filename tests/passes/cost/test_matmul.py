"""Seconds of matrix products: against published measurements, and what makes splitting too far bad."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.passes.cost.devices import device
from autopar.passes.cost.matmul import Product, product_seconds


def seconds(m, n, k, name="h100", batch=1, dtype="bfloat16"):
    """Return the seconds of one batch of products of 16 bit numbers."""
    product = Product(*(np.array([float(x)]) for x in (batch, m, n, k)))
    moved = 2.0 * batch * np.array([m * k + k * n + m * n])
    return float(product_seconds(product, moved, dtype, device(name))[0])


@pytest.mark.parametrize(
    ("name", "batch", "m", "n", "k", "tflops"),
    [
        ("h100", 1, 4096, 4096, 4096, 780.2),
        ("h100", 1, 4096, 1024, 2048, 643.7),
        ("h100", 2, 512, 1024, 4096, 474.7),
        ("h100", 4, 1024, 2048, 4096, 740.6),
        ("b200", 1, 4096, 1024, 2048, 990.3),
        ("b200", 4, 1024, 2048, 4096, 1341.4),
        ("b200", 1, 256, 4096, 512, 163.3),
        ("a100-40gb", 1, 8192, 12032, 12032, 241.2),
        ("a100-40gb", 1, 8192, 5568, 11136, 244.2),
        ("v100-32gb", 1, 2304, 4096, 3200, 85.3),
    ],
)
def test_published_rates(name, batch, m, n, k, tflops):
    """Within a quarter of OpenXLA's matmul table and of the sizing results of EleutherAI's cookbook."""
    measured = 2 * batch * m * n * k / (tflops * 1e12)
    predicted = seconds(m, n, k, name, batch, "float16") + device(name).launch_s
    assert predicted == pytest.approx(measured, rel=0.25)


@given(st.tuples(*[st.integers(1, 64)] * 3), st.tuples(*[st.integers(0, 64)] * 3))
def test_larger_is_no_faster(sizes, more):
    """The price grows with every size, in steps of eight (others are misaligned)."""
    small = [8 * size for size in sizes]
    large = [8 * (size + extra) for size, extra in zip(sizes, more)]
    assert seconds(*small) <= seconds(*large) * (1 + 1e-9)


def test_skinny_pieces_are_slower():
    """An eighth of the columns takes more than an eighth of the time, and the more so the smaller the whole."""
    for tokens in (256, 4096):
        whole, piece = seconds(tokens, 4096, 4096), seconds(tokens, 512, 4096)
        assert piece > 1.03 * whole / 8
    assert 8 * seconds(256, 512, 4096) / seconds(256, 4096, 4096) > 8 * seconds(4096, 512, 4096) / seconds(
        4096, 4096, 4096
    )


def test_odd_sizes_are_slower():
    """A vocabulary of 50257 costs more than one of 50304, though it is smaller."""
    assert seconds(8192, 50257, 768) > seconds(8192, 50304, 768)


def test_odd_counts_of_tokens_are_not():
    """What counts is the operands' rows in memory: a contracted dim that is no row may have any size."""
    sizes = [np.array([x]) for x in (1.0, 4096.0, 4096.0, 4097.0)]
    moved = np.array([0.0])
    plain = product_seconds(Product(*sizes), moved, "bfloat16", device("h100"))
    tokens = product_seconds(Product(*sizes, (sizes[1], sizes[2])), moved, "bfloat16", device("h100"))
    assert float(plain[0]) > 2 * float(tokens[0])


def test_one_unit_has_no_waves():
    """On a CPU the price is proportional to the flops."""
    assert seconds(1024, 1024, 4096, "cpu", dtype="float32") == pytest.approx(
        4 * seconds(1024, 256, 4096, "cpu", dtype="float32"), rel=0.01
    )
