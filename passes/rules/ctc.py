"""The CTC loss kept whole: samples are parallel, time and classes are read whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.passes import ops as _ops  # noqa: F401  (defines torch.ops.autopar)
from autopar.passes.rules.form import make_rule, operand_shapes
from autopar.passes.rules.rule import Rule
from autopar.passes.rules.table import replicated_rule, rule

CTC: Any = torch.ops.autopar.ctc.default


@rule(CTC)
def ctc(node: fx.Node) -> Rule:
    """The losses of samples and their slopes: rows of targets go with their samples."""
    if len(operand_shapes(node)[1]) != 2:
        return replicated_rule(node, "targets of all samples one behind the other")
    return make_rule(node, [[None, "n", None], ["n", None], ["n"], ["n"]], [["n"], [None, "n", None]])
