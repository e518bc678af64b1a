"""The page of rules is fresh, and the models leave no op without a rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.rules.coverage import coverage_page
from autopar.passes.rules.table import has_rule
from tests import models

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_of_rules_is_fresh() -> None:
    """``docs/rules.md`` is what the table says."""
    hint = "run: python -m autopar.passes.rules.coverage > docs/rules.md"
    assert (ROOT / "docs" / "rules.md").read_text() == coverage_page(), hint


@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama", "bert", "vit", "t5", "resnet"])
def test_every_op_of_the_models_is_in_the_table(name: str) -> None:
    """Nothing of an ordinary model is left to discovery, or replicated for want of a rule."""
    model, args, kwargs = getattr(models, name)()
    program = annotate(capture(model, args, kwargs))
    unknown = {str(node.target) for node in program.ops() if node.op != "get_attr" and not has_rule(node.target)}
    whole = {(str(node.target), node.meta["rule"].reason) for node in program.ops() if node.meta["rule"].reason}
    assert unknown == set()
    assert whole == set()
