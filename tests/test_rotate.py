"""The sample of slow cases."""

from __future__ import annotations

from tests.rotate import todays

CASES = [(kind, number) for kind in "abc" for number in range(4)]


def test_every_kind_has_its_turn() -> None:
    """One case of every kind and the others that are asked for, in their order, the same whenever it is asked."""
    for more in (0, 2, 100):
        found = todays(CASES, lambda case: case[0], more)
        assert {kind for kind, _ in found} == set("abc")
        assert found == sorted(found) == todays(CASES, lambda case: case[0], more)
        assert len(found) in (min(3 + more, 12), 12)
