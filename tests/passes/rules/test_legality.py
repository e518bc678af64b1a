"""Legality of choices on several axes."""

from __future__ import annotations

from autopar.mesh import Mesh
from autopar.passes.rules.legality import legal, legal_strategies, operand_layouts, result_layouts
from autopar.passes.rules.rule import Choice, Factor, Rule
from autopar.placement import PARTIAL, REPLICATE

MM = Rule(
    (Factor("m", 6), Factor("n", 8), Factor("k", 5, "sum")),
    (("m", "k"), ("k", "n")),
    (("m", "n"),),
    linear=((0,), (1,)),
)
SHAPES = ([(6, 5), (5, 8)], [(6, 8)])


def _named(rule: Rule, *names: str) -> list[Choice]:
    table = {choice.name: choice for choice in rule.choices()}
    return [table[name] for name in names]


def test_layouts_follow_the_choices() -> None:
    """One choice an axis gives one placement an axis to every operand and result."""
    choices = _named(MM, "m", "k")
    assert operand_layouts(choices) == ((0, 1), (REPLICATE, 0))
    assert result_layouts(choices) == ((0, PARTIAL["sum"]),)


def test_uneven_is_legal_and_empty_is_not() -> None:
    """Five over two leaves 3 and 2; five over four leaves an empty piece."""
    assert legal(MM, _named(MM, "k"), *SHAPES, Mesh((2,))) is None
    assert "empty piece" in str(legal(MM, _named(MM, "k"), *SHAPES, Mesh((4,))))


def test_nested_cuts_of_one_factor() -> None:
    """Six over two and three is one row a rank; six over two and four is not enough."""
    assert legal(MM, _named(MM, "m", "m"), *SHAPES, Mesh((2, 3))) is None
    assert "empty piece" in str(legal(MM, _named(MM, "m", "m"), *SHAPES, Mesh((2, 4))))


def test_even_factors_divide_by_all_their_axes() -> None:
    """An even factor of six goes over 2 and over 2 x 3, not over 2 x 2."""
    view = Rule((Factor("o", 6, even=True), Factor("i", 4)), (("o", None),), (("o",),))
    shapes = ([(6, 4)], [(24,)])
    assert legal(view, _named(view, "o", "o"), *shapes, Mesh((2, 3))) is None
    assert "evenly" in str(legal(view, _named(view, "o", "o"), *shapes, Mesh((2, 2))))


def test_partials_of_two_kinds_do_not_mix() -> None:
    """A value partial by sum on one axis and by max on another has no order of reduction."""
    op = Rule((), ((),), ((),), linear=((0,),), through=(("max", (0,)),))
    assert "mixes" in str(legal(op, _named(op, "partial(sum):0", "partial(max):0"), [()], [()], Mesh((2, 2))))
    assert legal(op, _named(op, "partial(max):0", "partial(max):0"), [()], [()], Mesh((2, 2))) is None


def test_an_axis_of_one_rank_replicates() -> None:
    """An axis of one rank has nothing to split."""
    assert "one rank" in str(legal(MM, _named(MM, "m", "replicate"), *SHAPES, Mesh((1, 2))))
    strategies = list(legal_strategies(MM, *SHAPES, Mesh((1, 2))))
    assert all(choices[0].name == "replicate" for choices in strategies)
    assert [c[1].name for c in strategies] == ["replicate", "m", "n", "k", "partial(sum):0", "partial(sum):1"]
