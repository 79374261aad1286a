"""The tables of docs/results.md are those that `study report` makes of the stored results."""

from pathlib import Path

import pytest

from coupled_adam.study.results import read_results
from coupled_adam.study.table_formats import to_markdown_table
from coupled_adam.study.tables import build_tables

DOCS = Path(__file__).parents[2] / "docs"
README = DOCS.parent / "README.md"
RESULTS = DOCS / "results" / "single-gpu"


def table_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("name", ["main", "crossing", "downstream"])
def test_a_table_of_the_results_page_is_that_of_the_stored_runs(name: str) -> None:
    table = next(table for table in build_tables(read_results(RESULTS)) if table.name == name)
    shown = (DOCS / "results.md").read_text().split(f"<!-- table {name} -->")[1].split("\n\n")[0]
    assert table_lines(shown) == table_lines(to_markdown_table(table))


def test_the_readme_shows_the_numbers_of_the_results_page() -> None:
    rows = {(row[0].text, row[2].text): row for row in build_tables(read_results(RESULTS))[0].rows}
    columns = [column.key for column in build_tables(read_results(RESULTS))[0].columns]
    shown = README.read_text().split("<!-- table single-gpu -->")[1].split("\n\n")[0]
    lines = [[cell.strip().strip("*") for cell in line.strip("|").split("|")] for line in table_lines(shown)[2:]]
    assert len(lines) == 5
    keys = ("mu_norm_ratio", "iso", "r_cos", "kappa", "loss")
    for key, (_, *values) in zip(keys, lines, strict=True):
        place = columns.index(key)
        expected = [rows[D, name][place].text for D in ("82M", "262M") for name in ("standard", "coupled")]
        assert values == expected, key
