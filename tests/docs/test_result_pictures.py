"""docs/results/pictures.py: the committed pictures are what it draws from the stored runs, and the page shows them."""

from pathlib import Path

import pytest
from page_text import text_of
from svg_files import DOCS, assert_same_picture, load_script

pytest.importorskip("matplotlib")
PAGE = text_of(None)
"""Both pages of results."""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    script = load_script(DOCS / "results" / "pictures.py")
    pictures: dict[str, str] = script.draw_pictures()
    return pictures


def test_the_committed_pictures_are_what_the_script_draws(drawn: dict[str, str]) -> None:
    for name, svg in drawn.items():
        assert_same_picture(name, svg)


def test_the_page_shows_every_picture(drawn: dict[str, str]) -> None:
    for name in drawn:
        assert f"](images/{name})" in PAGE, name


def test_every_section_of_a_question_has_a_picture() -> None:
    sections = PAGE.split("\n## ")[1:]
    without = [text.splitlines()[0] for text in sections if "![" not in text]
    assert without == ["Limits of all these results", "Reproduce the last three studies"]


def test_no_picture_of_results_is_left_over() -> None:
    pages = [PAGE, (DOCS.parent / "README.md").read_text()]
    for file in Path(DOCS / "images").glob("results-*.svg"):
        assert any(file.name in page for page in pages), file.name
