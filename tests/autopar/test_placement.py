"""How dims are cut over mesh axes."""

from __future__ import annotations

from itertools import product

import pytest

from autopar.placement import local_range, pieces_nonempty


@pytest.mark.parametrize("parts", [(1,), (2,), (5,), (2, 2), (2, 3), (3, 2), (2, 4), (3, 3), (2, 3, 2)])
def test_pieces_nonempty_means_no_rank_holds_nothing(parts: tuple[int, ...]) -> None:
    """The answer for all sizes up to 40 is that of every rank's own range: 7 over 2 x 3 leaves a rank without."""
    for size in range(1, 41):
        ranks = product(*(range(count) for count in parts))
        lengths = [local_range(size, list(zip(parts, rank)))[1] for rank in ranks]
        assert pieces_nonempty(size, parts) == all(lengths), size
