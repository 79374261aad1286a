"""The column seeds counts the seeds whose numbers the table shows."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fabricated_study import fabricate

from coupled_adam.report.grid import gather_grid
from coupled_adam.report.result_tables import build_tables
from coupled_adam.report.table_model import ReportTable
from coupled_adam.study.results import Result, read_results

LATER = {"downstream": "arc_easy", "quantised": "loss_int8_row"}


@pytest.fixture
def results(tmp_path: Path) -> list[Result]:
    """Two optimizers with three seeds each, without tasks and without quantised losses."""
    return read_results(fabricate(tmp_path / "study", with_runs=False))


def measured_with(results: Sequence[Result], metric: str, seeds: Sequence[int]) -> list[Result]:
    """The results after one more metric was measured on the first optimizer's seeds, and on all of the second's."""
    return [
        replace(each, metrics={**each.metrics, metric: 0.3 + 0.01 * each.seed})
        if each.seed in seeds or each.optimizer == "coupled"
        else each
        for each in results
    ]


def table_of(results: Sequence[Result], name: str) -> ReportTable:
    return next(table for table in build_tables(gather_grid(results)) if table.name == name)


def seeds_of(table: ReportTable) -> dict[str, str]:
    return {row[2].text: row[3].text for row in table.rows}


@pytest.mark.parametrize(("name", "metric"), LATER.items())
@pytest.mark.parametrize(("seeds", "shown"), [((), "0 of 3"), ((1,), "1 of 3"), ((1, 2, 3), "3")])
def test_seeds_without_the_measurement_are_not_counted(
    results: list[Result], name: str, metric: str, seeds: tuple[int, ...], shown: str
) -> None:
    found = measured_with(results, metric, seeds)
    assert seeds_of(table_of(found, name)) == {"standard": shown, "coupled": "3"}
    assert seeds_of(table_of(found, "main")) == {"standard": "3", "coupled": "3"}


def test_a_single_seed_with_tasks_is_named_as_the_reason_why_nothing_is_bold(results: list[Result]) -> None:
    table = table_of(measured_with(results, "arc_easy", [1]), "downstream")
    assert not any(cell.bold for row in table.rows for cell in row)
    assert any("only one seed" in note and "standard at" in note for note in table.notes)
    whole = table_of(measured_with(results, "arc_easy", [1, 2, 3]), "downstream")
    assert not any("only one seed" in note for note in whole.notes)
