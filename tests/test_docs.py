"""The documentation names what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autopar.plan_records import PlanRecord

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of a page names a file."""
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_field_of_a_plan_is_documented() -> None:
    """A new field needs a line in plan_format.md."""
    text = (ROOT / "docs" / "plan_format.md").read_text()
    for name in PlanRecord.__struct_fields__:
        assert f"`{name}`" in text, name


def test_every_page_is_in_the_index() -> None:
    """No page is left for chance to find."""
    text = (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or page.name in text, page.name


def test_every_make_target_of_the_readme_exists() -> None:
    """The two commands, and the others that are spoken of, are targets of the Makefile."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    spoken = set(
        re.findall(
            r"(?:`|    )make ([a-z]+)", (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
        )
    )
    assert {"demo", "test", "check"} <= spoken <= targets
