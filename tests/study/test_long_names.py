"""Long names of runs on a terminal of 80 columns: broken after a hyphen or slash, never within a word."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from coupled_adam.base.progress import LongName, print_fitted
from coupled_adam.config.study_config import load_study
from coupled_adam.study.expansion import cells_of
from coupled_adam.study.folder import StudyFolder
from coupled_adam.study.overview import plan_table, status_table

LONG = "30M-82M-partial-y0.25-mean-free-lr_factor0.333333/seed-0"


def first_column(table: Table) -> list[str]:
    """The lines of the first column at 80 columns, without its heading."""
    out = io.StringIO()
    Console(file=out, width=80, highlight=False).print(table)
    return [line.split("│")[1].strip() for line in out.getvalue().splitlines() if line.startswith("│")]


@pytest.mark.parametrize("study", ["rivals", "muon"])
def test_plan_and_status_break_names_only_between_words(study: str, tmp_path: Path) -> None:
    loaded = load_study(study)
    cells, folder = cells_of(loaded), StudyFolder(tmp_path)
    for table, names in (
        (plan_table(loaded, cells, folder), list(dict.fromkeys(cell.id for cell in cells))),
        (status_table(loaded, cells, folder), [cell.label for cell in cells]),
    ):
        words = {word for name in names for word in re.split(r"[-/]", name)}
        lines = [line for line in first_column(table) if line != "all runs"]
        assert "".join(lines) == "".join(names)
        assert {word for line in lines for word in re.split(r"[-/]", line)} - {""} <= words
        assert not any(line.isdigit() for line in lines)  # seed-0 is not broken


@pytest.mark.parametrize("width", [4, 10, 26, 100])
def test_a_name_fits_every_width_and_loses_nothing(width: int) -> None:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(LongName(LONG))
    lines = out.getvalue().split("\n")
    assert max(map(len, lines)) <= width
    assert "".join(lines) == LONG


def test_brackets_in_a_name_are_text() -> None:
    out = io.StringIO()
    Console(file=out, width=80, highlight=False).print(LongName("a[red]b"))
    assert out.getvalue() == "a[red]b\n"


def numbers(count: int) -> Table:
    """A table with a name of several words and many columns of numbers."""
    table = Table("optimizer")
    for _ in range(count):
        table.add_column("loss", justify="right", no_wrap=True)
    table.add_row("partial y=0.25 mean-free", *["0.123(4)*"] * count)
    return table


@pytest.mark.parametrize(("count", "most"), [(3, 80), (5, 80), (6, 80), (9, 999)])
def test_numbers_stay_whole_and_names_wrap_only_if_they_must(count: int, most: int) -> None:
    out = io.StringIO()
    print_fitted(Console(file=out, width=80, force_terminal=True, color_system=None), numbers(count))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= most
    assert sum(line.count("0.123(4)*") for line in lines) == count
    assert "…" not in out.getvalue()
    assert ("partial y=0.25 mean-free" in out.getvalue()) == (count in (3, 9))


def test_a_pipe_gets_the_whole_table() -> None:
    out = io.StringIO()
    print_fitted(Console(file=out, width=80), numbers(6))
    assert "partial y=0.25 mean-free" in out.getvalue()
