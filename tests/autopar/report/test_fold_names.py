"""Folding of repeated names."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autopar.report.fold_names import fold_names, natural_key, pattern_of


def test_every_index_of_a_pattern_is_a_star() -> None:
    """One key for all copies: one row with a star; two keys: two rows with their indices."""
    assert [fold.label for fold in fold_names({f"h.{i}.w": 1 for i in range(12)})] == ["h.*.w"]
    assert [fold.label for fold in fold_names({f"h.{i}.w": i % 2 for i in range(4)})] == ["h.0,2.w", "h.1,3.w"]


def test_a_part_of_the_names_is_no_star() -> None:
    """When others of the pattern exist elsewhere, the label says which ones these are."""
    names = [f"h.{i}.w" for i in range(4)]
    assert [fold.label for fold in fold_names(dict.fromkeys(names[:2], 1), within=names)] == ["h.0-1.w"]


def test_an_index_that_all_share_stands_in_the_label() -> None:
    """Two parts of a block with parts by number are two labels, not one label twice."""
    parts = {f"h.{i}.{part}.w": part for i in range(4) for part in (1, 3)}
    assert [fold.label for fold in fold_names(parts)] == ["h.*.1.w", "h.*.3.w"]
    some = {name: key for name, key in parts.items() if not name.startswith("h.2")}
    assert [fold.label for fold in fold_names(some, within=parts)] == ["h.0-1,3.1.w", "h.0-1,3.3.w"]
    assert [fold.label for fold in fold_names(dict.fromkeys(parts, 0))] == ["h.*.*.w"]


def test_digits_inside_a_word_are_no_index() -> None:
    """``w1`` and ``w2`` are two parameters, not copies of one."""
    assert pattern_of("layers.3.mlp.w1.weight") == "layers.*.mlp.w1.weight"
    assert pattern_of("0.weight of 2.1.weight, split along dim 1") == "*.weight of *.*.weight, split along dim 1"
    assert pattern_of("h.3") == "h.*"
    assert len(fold_names({"a.w1": 1, "a.w2": 1})) == 2


def test_names_are_in_natural_order() -> None:
    """``2`` comes before ``10``."""
    assert sorted(["h.10", "h.2", "g"], key=natural_key) == ["g", "h.2", "h.10"]


@given(st.dictionaries(st.from_regex(r"[a-c](\.[0-9]{1,2}){0,2}(\.w)?", fullmatch=True), st.integers(0, 2)))
def test_folds_hold_every_name_once(keys: dict[str, int]) -> None:
    """No name is lost or told twice, and a fold's names share its key."""
    folds = fold_names(keys)
    assert sorted(name for fold in folds for name in fold.names) == sorted(keys)
    assert all(keys[name] == fold.key for fold in folds for name in fold.names)
