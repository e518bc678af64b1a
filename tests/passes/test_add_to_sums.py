"""The backward of a micro-batch in its second form: sums so far are taken, new ones are given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from autopar.passes.add_to_sums import add_to_sums
from autopar.passes.stage_pieces import ADDING, BACKWARD, WEIGHT, Segment, Total
from tests.passes.test_cut_stages import staged

_OPS: Any = torch.ops.aten


def segment(reduced: bool = False) -> Segment:
    """Return a segment that gives ``double`` and ``view``, which lies in the memory of its operand."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    double = graph.call_function(_OPS.mul.Tensor, (x, 2))
    view = graph.call_function(_OPS.view.default, (x, [4]))
    for node in (x, double, view):
        node.meta = {"val": torch.empty(4), "phase": "backward"} | ({"arc": None} if reduced and node is double else {})
    graph.output((double, view))
    return Segment(fx.GraphModule(torch.nn.Module(), graph), ("x",), ("double", "view"))


def total(part: str, op: str = "sum") -> Total:
    """Return the total of a part."""
    return Total(f"all_{part}", part, BACKWARD, op)


def run(made: Segment, *arguments: Tensor) -> dict[str, Tensor]:
    """Run a segment; return what it gives by name."""
    return dict(zip(made.gives, made.graph_module(*arguments), strict=True))


def test_it_takes_the_sums_so_far_and_gives_the_new_ones() -> None:
    """Behind what it took; parts that nobody else reads are not given, and what comes in stays as it is."""
    made = add_to_sums(segment(), [total("double"), total("view")], ["view"])
    assert made is not None
    assert made.takes == ("x", "all_double", "all_view")
    assert made.gives == ("view", "all_double", "all_view")
    assert [node.name for node in made.graph_module.graph.nodes if node.op == "placeholder"] == list(made.takes)
    x, earlier = torch.arange(4.0), torch.full((4,), 10.0)
    found = run(made, x, earlier, earlier)
    assert found["all_double"].tolist() == [10, 12, 14, 16]
    assert found["all_view"].tolist() == [10, 11, 12, 13]
    assert x.tolist() == [0, 1, 2, 3] and earlier.tolist() == [10] * 4


def test_totals_that_are_no_sums_stay_parts() -> None:
    """What is joined is given by each micro-batch; without a sum there is no second form."""
    assert add_to_sums(segment(), [total("double", "join"), total("elsewhere")], []) is None
    made = add_to_sums(segment(), [total("double", "join"), total("view")], ["double"])
    assert made is not None and made.gives == ("double", "all_view")


def test_a_part_is_added_where_it_is_made_unless_it_was_reduced() -> None:
    """The add of a collective's result would wait for it at once."""

    def behind(reduced: bool) -> list[str]:
        made = add_to_sums(segment(reduced), [total("double")], ["view"])
        assert made is not None
        made.graph_module.graph.lint()
        return [node.name for node in made.graph_module.graph.nodes if node.op == "call_function"]

    assert behind(reduced=False) == ["mul_tensor", "add_tensor", "view_default"]
    assert behind(reduced=True) == ["mul_tensor", "view_default", "add_tensor"]


def test_every_part_of_a_backward_that_gives_to_sums_has_a_second_form() -> None:
    """In two parts too; it gives all sums, and no gradient beside them."""
    for pieces in staged(("transformer.h.1",), split=True).stages:
        sums = {total.name: total.part for total in pieces.totals if total.when == BACKWARD}
        given = set()
        for when in (BACKWARD, WEIGHT):
            if when in pieces.segments and ADDING[when] in pieces.segments:
                first, later = pieces.segments[when], pieces.segments[ADDING[when]]
                given |= set(later.gives) & set(sums)
                assert {sums[name] for name in later.gives if name in sums} <= set(first.gives)
        assert sums and given == set(sums)
