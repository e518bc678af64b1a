"""The link of several axes together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.passes.cost.devices import axis_links, link
from autopar.passes.cost.join_links import join_links

BETWEEN = ("infiniband_400", "ethernet_25")


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("sizes", [(4, 8), (2, 4), (4, 4), (2, 16), (2, 2, 8), (4, 2, 4), (2, 2, 2)])
def test_axes_together_are_one_axis_of_as_many_ranks(sizes: tuple[int, ...], between: str) -> None:
    """All axes of a mesh have the link that the only axis of a mesh of as many ranks has, whatever its name."""
    links = [link(name) for name in axis_links(sizes, 8, "nvlink4", between)]
    ranks = 1
    for size in sizes:
        ranks *= size
    (whole,) = [link(name) for name in axis_links((ranks,), 8, "nvlink4", between)]
    found = join_links(links, sizes)
    assert found is not None
    assert replace(found, name="", bytes_per_s=0.0) == replace(whole, name="", bytes_per_s=0.0)
    assert found.bytes_per_s == pytest.approx(whole.bytes_per_s)


def test_what_does_not_fit_is_not_guessed() -> None:
    """Nearer ranks on the slower link, or two fast links of different kinds: nothing says how they lie."""
    fast, slow = link("nvlink4"), link("infiniband_400")
    assert join_links([fast, slow], [2, 2]) is None
    assert join_links([link("nvlink4*2+infiniband_400"), link("nvlink3")], [4, 2]) is None
    assert join_links([slow], [4]) == slow
