"""The tables of docs/results.md are those that `study report` makes of the stored results."""

from pathlib import Path

import numpy as np
import pytest

from coupled_adam.study.results import read_results
from coupled_adam.study.table_formats import to_markdown_table
from coupled_adam.study.tables import build_tables

DOCS = Path(__file__).parents[2] / "docs"
README = DOCS.parent / "README.md"
STORED = DOCS / "results"
RESULTS = STORED / "single-gpu"
SHORT, LONG = 82_000_000, 262_000_000


def table_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("name", ["main", "crossing", "downstream"])
def test_a_table_of_the_results_page_is_that_of_the_stored_runs(name: str) -> None:
    table = next(table for table in build_tables(read_results(RESULTS)) if table.name == name)
    shown = (DOCS / "results.md").read_text().split(f"<!-- table {name} -->")[1].split("\n\n")[0]
    assert table_lines(shown) == table_lines(to_markdown_table(table))


@pytest.mark.parametrize(
    ("study", "tokens"), [("untied-heads", [SHORT]), ("single-gpu-scaled", [LONG]), ("centring", [SHORT, LONG])]
)
def test_the_table_of_an_open_question_is_that_of_its_runs_beside_the_main_ones(study: str, tokens: list[int]) -> None:
    results = [each for folder in (RESULTS, STORED / study) for each in read_results(folder) if each.tokens in tokens]
    shown = (DOCS / "results.md").read_text().split(f"<!-- table {study} main -->")[1].split("\n\n")[0]
    assert table_lines(shown) == table_lines(to_markdown_table(build_tables(results)[0]))


def test_the_table_of_the_input_tables_is_that_of_the_stored_runs() -> None:
    shown = (DOCS / "results.md").read_text().split("<!-- table input -->")[1].split("\n\n")[0]
    expected = []
    for result in read_results(STORED / "untied-heads"):
        m = {name: value or 0.0 for name, value in result.metrics.items()}
        lengths = f"{m['mu_norm']:.4f} | {m['input_mu_norm']:.4f} | {m['input_mu_norm_ratio']:.2f}"
        rest = f"{m['input_iso']:.2f} | {m['input_r_cos']:.0f} | {m['loss']:.3f}"
        expected.append(f"| {result.optimizer} | {lengths} | {rest} |")
    assert table_lines(shown)[2:] == expected


def test_the_share_of_one_direction_is_that_of_the_stored_singular_values() -> None:
    shares = {}
    for folder in (RESULTS, STORED / "centring"):
        for path in folder.glob("runs/30M-262M-*/seed-1/embeddings.npz"):
            squares = np.load(path)["singular_values"].astype(np.float64) ** 2
            shares[path.parts[-3].removeprefix("30M-262M-")] = f"{100 * squares[0] / squares.sum():.0f}%"
    assert shares == {"standard": "90%", "standard-centred": "80%", "coupled": "4%"}
    page = (DOCS / "results.md").read_text()
    assert "80% of their squared length is\n  in one direction (90% with standard Adam, 4% with Coupled Adam)" in page


def test_the_readme_shows_the_numbers_of_the_results_page() -> None:
    rows = {(row[0].text, row[2].text): row for row in build_tables(read_results(RESULTS))[0].rows}
    columns = [column.key for column in build_tables(read_results(RESULTS))[0].columns]
    shown = README.read_text().split("<!-- table single-gpu -->")[1].split("\n\n")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table_lines(shown)[2:]]
    assert len(lines) == 5
    keys = ("mu_norm_ratio", "iso", "r_cos", "kappa", "loss")
    for key, (_, *values) in zip(keys, lines, strict=True):
        place = columns.index(key)
        cells = [rows[D, name][place] for D in ("82M", "262M") for name in ("standard", "coupled")]
        expected = [f"**{cell.text}**" if cell.bold else cell.text for cell in cells]
        assert values == expected, key
