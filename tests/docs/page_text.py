"""What a page says: its text without line breaks, a section, and the tables that follow a marker."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def words(page: str) -> str:
    """A page without line breaks, so that text is found across lines."""
    return " ".join((ROOT / page).read_text().split())


def section(heading: str, page: str = "docs/results.md") -> str:
    """The section of a page whose heading starts with these words, without line breaks."""
    [found] = [part for part in (ROOT / page).read_text().split("\n## ") if part.startswith(heading)]
    return " ".join(found.split())


def table_lines(text: str) -> list[str]:
    """The lines of a text that belong to a table."""
    return [line for line in text.splitlines() if line.startswith("|")]


def lines_of(name: str, page: str = "docs/results.md") -> list[str]:
    """The lines of the table after the marker `<!-- table NAME -->`."""
    return table_lines((ROOT / page).read_text().split(f"<!-- table {name} -->")[1].split("\n\n")[0])


def cells_of(name: str, page: str = "docs/results.md") -> list[list[str]]:
    """The cells of that table, row by row, with its heading and the line below."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines_of(name, page)]
