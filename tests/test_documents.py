"""What the documents name: files and headings that exist, decisions with numbers of their own."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DECISIONS = sorted((ROOT / "docs/decisions").glob("*.md"))
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *DECISIONS,
]
FOLDERS = ("strata_nb", "bench", "tools", "tests", "docs")


def anchors(document: Path) -> set[str]:
    """Return what links to headings of a document end with."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}


def test_every_decision_has_a_number_of_its_own() -> None:
    numbers = [int(one.name.partition("-")[0]) for one in DECISIONS]
    assert [number for number, count in Counter(numbers).items() if count > 1] == []
    for number, one in zip(numbers, DECISIONS, strict=True):
        assert one.read_text().startswith(f"# {number}. ")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda one: one.name)
def test_links_lead_to_files_and_headings_that_exist(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if not link.startswith("https://"):
            path, _, heading = link.partition("#")
            target = document.parent / path if path else document
            assert target.exists(), link
            assert not heading or heading in anchors(target), link


def test_files_of_the_code_that_documents_name_exist() -> None:
    known = {one.name for folder in FOLDERS for one in (ROOT / folder).rglob("*.py")}
    for document in DOCUMENTS:
        named = re.findall(r"`(?:[\w./]+/)?(\w+\.py)`", document.read_text())
        assert [one for one in named if one not in known] == [], document.name
