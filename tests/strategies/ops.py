"""Arguments for every op in the table of rules: one generator an op, drawing shapes, dtypes and options."""

from __future__ import annotations

from tests.strategies import (
    ops_contract,
    ops_ctc,
    ops_elementwise,
    ops_factories,
    ops_images,
    ops_indexing,
    ops_micro_batches,
    ops_reductions,
    ops_views,
)
from tests.strategies.op_draws import GENERATORS, Draw

__all__ = ["GENERATORS", "Draw"]

ops_contract.enter_contractions()
ops_contract.enter_attention()
ops_ctc.enter_ctc()
ops_elementwise.enter_elementwise()
ops_factories.enter_factories()
ops_images.enter_images()
ops_indexing.enter_indexing()
ops_micro_batches.enter_micro_batches()
ops_reductions.enter_reductions()
ops_reductions.enter_norms()
ops_views.enter_views()
ops_views.enter_slices()
