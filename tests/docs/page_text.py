"""What a page says: its text without line breaks, a section, and the tables that follow a marker."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ("docs/results.md", "docs/results-further.md")


def words(page: str) -> str:
    """A page without line breaks, so that text is found across lines."""
    return " ".join((ROOT / page).read_text().split())


def text_of(page: str | None) -> str:
    """The text of a page; without a page, of both pages of results."""
    return "\n".join((ROOT / each).read_text() for each in ([page] if page else RESULTS))


def section(heading: str, page: str | None = None) -> str:
    """The section, without line breaks, whose heading starts with these words, on a page of results or another page."""
    [found] = [part for part in text_of(page).split("\n## ") if part.startswith(heading)]
    return " ".join(found.split())


def table_lines(text: str) -> list[str]:
    """The lines of a text that belong to a table."""
    return [line for line in text.splitlines() if line.startswith("|")]


def lines_of(name: str, page: str | None = None) -> list[str]:
    """The lines of the table after the marker `<!-- table NAME -->` on a page of results, or on another page."""
    return table_lines(text_of(page).split(f"<!-- table {name} -->")[1].split("\n\n")[0])


def cells_of(name: str, page: str | None = None) -> list[list[str]]:
    """The cells of that table, row by row, with its heading and the line below."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines_of(name, page)]
