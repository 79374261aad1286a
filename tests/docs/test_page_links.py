"""Every link between the pages has an existing file and heading as its target."""

import re
from pathlib import Path

import pytest
from page_examples import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def prose(page: Path) -> str:
    """A page without its code blocks, where a `#` is a comment and a bracket an index."""
    return re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_have_existing_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file) if file else page
        assert linked.exists(), target
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked), target


def test_the_how_to_on_studies_and_its_reference_link_to_each_other() -> None:
    how_to, reference = (prose(ROOT / "docs" / name) for name in ("study.md", "study-reference.md"))
    assert "](study-reference.md" in how_to
    assert "](study.md)" in reference
    assert "](statistics.md)" in how_to
    assert "](report.md)" in how_to
